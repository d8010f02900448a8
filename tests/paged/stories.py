"""Small managers, and what a sequence does to them, for tests that read as stories."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np

from octavo import paged

# Compiled once per pool size: run eagerly, every loop in them would compile at every call.
jitted = SimpleNamespace(
    **{
        name: jax.jit(getattr(paged, name))
        for name in ("admit", "append", "publish", "release", "stats", "match")
    },
    reserve=jax.jit(paged.reserve, static_argnums=2),
)


def story(num_blocks: int, size: int = 4, seats: int = 4, columns: int = 12):
    return paged.init_cache(num_blocks, size), paged.init_tables(seats, columns)


def admit(state, tables, seat: int, tokens, namespace: int = 0):
    columns, size = tables.block_ids.shape[1], state.index.block_size
    padded = np.zeros((columns, size), np.int32)
    padded.reshape(-1)[: len(tokens)] = tokens
    return jitted.admit(state, tables, seat, padded, len(tokens), namespace)


def publish(state, tables, seat: int, tokens, namespace: int = 0):
    columns, size = tables.block_ids.shape[1], state.index.block_size
    full = len(tokens) // size
    padded = np.zeros((columns, size), np.int32)
    padded.reshape(-1)[: full * size] = tokens[: full * size]
    filled = paged.FilledBlocks(
        seat=np.full(columns, seat, np.int32),
        column=np.arange(columns, dtype=np.int32),
        tokens=padded,
        num_tokens=np.full(columns, size, np.int32),
        namespace=np.full(columns, namespace, np.int32),
    )
    state, tables, ok = jitted.publish(state, tables, filled, full)
    assert ok
    return state, tables


def cache_prompt(state, tables, tokens, namespace: int = 0, seat: int = 0):
    state, tables, got = admit(state, tables, seat, tokens, namespace)
    assert got.ok
    state, tables = publish(state, tables, seat, tokens, namespace)
    state, tables, ok = jitted.release(state, tables, seat)
    assert ok
    return state, tables, int(got.num_cached_tokens)


def counts(state) -> tuple[int, int, int]:
    got = jitted.stats(state)
    return int(got.num_free), int(got.num_cached), int(got.num_active)
