"""Sharing between running sequences: fork, copy on write, truncate and release.

Beam search and parallel sampling are these three and nothing else. Two beams over a prompt of six
tokens, in blocks of four; the second beam wins and is taken twice:

    >>> state, tables = init_cache(num_blocks=16, block_size=4), init_tables(3, 4)
    >>> prompt = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    >>> state, tables, got = admit(state, tables, 0, prompt, 6, namespace=0)
    >>> beams, length = jnp.array([0, 1]), jnp.array([6, 6])
    >>> state, tables, ok = fork(state, tables, beams[:1], beams[1:])
    >>> state, tables, copies, ok = copy_on_write(state, tables, beams, length)
    >>> int((copies.target != 0).sum())  # the prompt's tail, once: its other holder keeps it
    1
    >>> state, tables, ok = append(state, tables, jnp.array([7, 7, 0]), 1)
    >>> state, tables, ok = release(state, tables, beams[:1])
    >>> state, tables, ok = fork(state, tables, beams[1:], beams[:1])
    >>> [int(n) for n in state.pool.ref_count[tables.block_ids[0, :2]]]
    [2, 2]

Keep `(state, tables)` and you can go back to it: old states stay valid unless they were donated.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from ..pallas_kernels.layout import debug_check
from .cache import BlockCopies, reserve
from .eviction import touch
from .index import limit_clock
from .pool import allocate, decref, incref
from .state import CacheState
from .tables import BlockTables, blocks_for


def fork(
    state: CacheState,
    tables: BlockTables,
    source: jax.typing.ArrayLike,
    target: jax.typing.ArrayLike,
    *,
    enabled: jax.Array | None = None,
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Let empty rows share all blocks of other rows; nothing is copied.

    Args:
        state, tables: the manager.
        source, target: `int32[n]` or `int32[]` seats; a source may stand several times.
        enabled: `bool[n]` which of them count; None means all.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if a seat is out of
        range, a source is empty, or a target is not.
    """
    source, target, enabled = _seats(source, target, enabled=enabled)
    num_seqs = tables.num_blocks.shape[0]
    used = _used(tables, source)
    free = (target >= 0) & (target < num_seqs) & ~_used(tables, target)
    ok = jnp.all(~enabled | (used & free)) & _distinct(target, enabled)
    debug_check(ok, "fork: a seat is out of range, a source empty or a target not")
    enabled &= ok
    rows = jnp.where(enabled[:, None], tables.block_ids[_safe(tables, source)], NULL_BLOCK)
    pool, _ = incref(state.pool, rows.reshape(-1))
    to = jnp.where(enabled, target, num_seqs)
    from_ = _safe(tables, source)
    tables = BlockTables(
        block_ids=tables.block_ids.at[to].set(rows, mode="drop"),
        num_blocks=tables.num_blocks.at[to].set(tables.num_blocks[from_], mode="drop"),
        priority=tables.priority.at[to].set(tables.priority[from_], mode="drop"),
    )
    return replace(state, pool=pool), tables, ok


def copy_on_write(
    state: CacheState,
    tables: BlockTables,
    seats: jax.typing.ArrayLike,
    positions: jax.typing.ArrayLike,
    *,
    enabled: jax.Array | None = None,
) -> tuple[CacheState, BlockTables, BlockCopies, jax.Array]:
    """Make the blocks that are about to be written the sequences' own.

    A block is copied if another sequence holds it, or if the index finds it by the token that is
    about to be overwritten. Of several sequences that all write a block, one keeps it. To write
    further back than a sequence's last block, `truncate` first.

    Args:
        state, tables: the manager.
        seats: `int32[n]` or `int32[]`, distinct.
        positions: `int32[n]` or `int32[]` token position that each will write next.
        enabled: `bool[n]` which of them count; None means all.

    Returns:
        `(state, tables, copies, ok bool[])`, copies `int32[n]`; `ok` is False, and nothing
        changes, if a seat is out of range, empty or stands twice, a position has no block or
        indexed blocks after it, or the pool is short.
    """
    seats, positions, enabled = _seats(seats, positions, enabled=enabled)
    block_size = state.index.block_size
    row, column = _safe(tables, seats), positions // block_size
    inside = _used(tables, seats) & (positions >= 0) & (column < tables.num_blocks[row])
    # What is indexed after it is found by the tokens before, which are about to change.
    after = jnp.arange(tables.block_ids.shape[1], dtype=jnp.int32) > column[:, None]
    inside &= ~jnp.any(after & state.index.indexed[tables.block_ids[row]], axis=1)
    valid = jnp.all(~enabled | inside) & _distinct(seats, enabled)
    debug_check(valid, "copy_on_write: a position has no block, or indexed blocks after it")
    here = enabled & inside
    own = jnp.where(here, tables.block_ids[row, jnp.where(here, column, 0)], NULL_BLOCK)

    found = positions % block_size < state.index.num_tokens[own]
    same = (own[:, None] == own[None, :]) & here[None, :] & here[:, None]
    writers = jnp.sum(same, axis=1, dtype=jnp.int32)
    later = jnp.any(jnp.triu(same, 1), axis=1)
    refs = state.pool.ref_count[own]
    keeps = ~found & ((refs == 1) | ((refs == writers) & ~later))
    copied = here & ~keeps
    total = jnp.sum(copied, dtype=jnp.int32)

    state, ok = reserve(state, total, own.shape[0], enabled=valid)
    copied &= ok
    pool, fresh, _ = allocate(state.pool, jnp.where(ok, total, 0), own.shape[0])
    new = jnp.where(copied, fresh[jnp.maximum(jnp.cumsum(copied) - 1, 0)], NULL_BLOCK)
    pool, _ = decref(pool, jnp.where(copied, own, NULL_BLOCK), state.index.indexed)
    target = jnp.where(copied, seats, tables.num_blocks.shape[0])
    tables = replace(tables, block_ids=tables.block_ids.at[target, column].set(new, mode="drop"))
    copies = BlockCopies(source=jnp.where(copied, own, NULL_BLOCK), target=new)
    return replace(state, pool=pool), tables, copies, ok


def truncate(
    state: CacheState,
    tables: BlockTables,
    seats: jax.typing.ArrayLike,
    num_tokens: jax.typing.ArrayLike,
    *,
    enabled: jax.Array | None = None,
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Give back the blocks past a sequence's first tokens; indexed ones stay cached.

    What is written next may lie in a block that others share or find: `copy_on_write` first.

    Args:
        state, tables: the manager.
        seats: `int32[n]` or `int32[]`, distinct.
        num_tokens: `int32[n]` or `int32[]` tokens to keep, at most as many as there is room for.
        enabled: `bool[n]` which of them count; None means all.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if a seat is out of
        range or empty, or holds less than what is to be kept.
    """
    seats, num_tokens, enabled = _seats(seats, num_tokens, enabled=enabled)
    num_seqs, max_blocks = tables.block_ids.shape
    kept = blocks_for(num_tokens, state.index.block_size)
    row = _safe(tables, seats)
    valid = _used(tables, seats) & (num_tokens >= 0) & (kept <= tables.num_blocks[row])
    ok = jnp.all(~enabled | valid) & _distinct(seats, enabled)
    debug_check(ok, "truncate: a seat is out of range, empty or shorter than what is kept")
    enabled &= ok

    rows = jnp.where(enabled[:, None], tables.block_ids[row], NULL_BLOCK)
    dropped = jnp.arange(max_blocks, dtype=jnp.int32) >= kept[:, None]
    # The whole path, so that no block that goes outlives its parents.
    index, policy = touch(
        limit_clock(state.index, ok), state.policy, rows, priority=tables.priority[row]
    )
    pool, _ = decref(state.pool, jnp.where(dropped, rows, NULL_BLOCK).reshape(-1), index.indexed)
    target = jnp.where(enabled, seats, num_seqs)
    tables = replace(
        tables,
        block_ids=tables.block_ids.at[target].set(
            jnp.where(dropped, NULL_BLOCK, rows), mode="drop"
        ),
        num_blocks=tables.num_blocks.at[target].set(kept, mode="drop"),
        priority=tables.priority.at[jnp.where(kept > 0, num_seqs, target)].set(0, mode="drop"),
    )
    return replace(state, pool=pool, index=index, policy=policy), tables, ok


def release(
    state: CacheState,
    tables: BlockTables,
    seats: jax.typing.ArrayLike,
    *,
    enabled: jax.Array | None = None,
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Give back all blocks of sequences; indexed ones stay cached, most recently used.

    Args:
        state, tables: the manager.
        seats: `int32[n]` or `int32[]`, distinct.
        enabled: `bool[n]` which of them count; None means all.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if a seat is out of
        range or empty.
    """
    return truncate(state, tables, seats, jnp.zeros_like(jnp.asarray(seats)), enabled=enabled)


def _seats(
    seats: jax.typing.ArrayLike, other: jax.typing.ArrayLike, *, enabled: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    first = jnp.atleast_1d(jnp.asarray(seats, jnp.int32))
    second = jnp.atleast_1d(jnp.asarray(other, jnp.int32))
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"{first.shape=} and {second.shape=} must be equal and of one axis")
    return first, second, jnp.ones(first.shape, bool) if enabled is None else enabled


def _safe(tables: BlockTables, seats: jax.Array) -> jax.Array:
    return jnp.clip(seats, 0, tables.num_blocks.shape[0] - 1)


def _used(tables: BlockTables, seats: jax.Array) -> jax.Array:
    inside = (seats >= 0) & (seats < tables.num_blocks.shape[0])
    return inside & (tables.num_blocks[_safe(tables, seats)] > 0)


def _distinct(seats: jax.Array, enabled: jax.Array) -> jax.Array:
    # What is not enabled becomes a number of its own.
    own = jnp.where(enabled, seats, -1 - jnp.arange(seats.shape[0], dtype=jnp.int32))
    ranked = jnp.sort(own)
    return ~jnp.any((ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0))
