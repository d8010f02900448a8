"""How long the block manager takes, each operation beside its baseline in the same run.

    python benchmarks/block_manager.py [--json FILE]

The baseline of `match` is what host-side managers do: SHA-256 over the pickled (parent's digest,
tokens) of each block, looked up in a dictionary. The others are held against themselves in a pool
of another size: their cost must not depend on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo import paged

BLOCK = 16
SEQS = 256
COLUMNS = 16
SMALL, LARGE = 4_096, 262_144
POOL = 131_072


def timed(call: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Median and 90th percentile in milliseconds of `call`, which blocks."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), sorted(times)[int(0.9 * (runs - 1))]


def filled_cache(tokens: np.ndarray) -> paged.CacheState:
    """A pool of `POOL` blocks in which the blocks of `tokens: int32[n, B]` are cached, and as many
    chains of eight other blocks as fit."""
    state = paged.init_cache(POOL, BLOCK)
    state = cache_chain(state, tokens)
    columns = 4_096
    rng = np.random.default_rng(1)
    step = jax.jit(_cache_chains, donate_argnums=0)
    while int(state.pool.num_free) >= columns:
        others = rng.integers(1, 50_000, (columns // 8, 8, BLOCK), dtype=np.int32)
        state = step(state, jnp.asarray(others))
    return state


def _cache_chains(state: paged.CacheState, chains: jax.Array) -> paged.CacheState:
    num, length, _ = chains.shape
    tables = paged.init_tables(num, length)
    state, tables, _ = paged.append(state, tables, jnp.full(num, length * BLOCK, jnp.int32), length)
    filled = paged.FilledBlocks(
        seat=jnp.repeat(jnp.arange(num, dtype=jnp.int32), length),
        column=jnp.tile(jnp.arange(length, dtype=jnp.int32), num),
        tokens=chains.reshape(-1, BLOCK),
        num_tokens=jnp.full(num * length, BLOCK, jnp.int32),
        namespace=jnp.zeros(num * length, jnp.int32),
    )
    state, tables, _ = paged.publish(state, tables, filled, num * length)
    return paged.release(state, tables, jnp.arange(num))[0]


def cache_chain(state: paged.CacheState, tokens: np.ndarray) -> paged.CacheState:
    """The state with one more sequence of blocks `int32[n, B]` cached."""
    return jax.jit(_cache_chains)(state, jnp.asarray(tokens)[None])


class HashedDict:
    """The baseline: a dictionary from chained SHA-256 digests to block ids."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}

    @staticmethod
    def digests(tokens: list[int]) -> list[bytes]:
        parent, out = b"", []
        for i in range(0, len(tokens), BLOCK):
            data = pickle.dumps((parent, tuple(tokens[i : i + BLOCK])), pickle.HIGHEST_PROTOCOL)
            parent = hashlib.sha256(data).digest()
            out.append(parent)
        return out

    def publish(self, tokens: list[int]) -> None:
        for block, digest in enumerate(self.digests(tokens)):
            self._blocks[digest] = block

    def match(self, tokens: list[int]) -> int:
        for count, digest in enumerate(self.digests(tokens)):
            if digest not in self._blocks:
                return count
        return len(tokens) // BLOCK


def bench_match(num_tokens: int, runs: int) -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(1, 50_000, (num_tokens // BLOCK, BLOCK), np.int32)
    index = filled_cache(tokens).index
    match = jax.jit(paged.match)
    on_device = jnp.asarray(tokens)
    _, found = match(index, on_device, len(tokens), 0)
    assert int(found) == len(tokens), f"found {int(found)} of {len(tokens)} blocks"
    median, p90 = timed(
        lambda: jax.block_until_ready(match(index, on_device, len(tokens), 0)), runs
    )

    baseline, flat = HashedDict(), tokens.reshape(-1).tolist()
    baseline.publish(flat)
    assert baseline.match(flat) == len(tokens)
    theirs, _ = timed(lambda: baseline.match(flat), max(runs // 10, 3))
    return {
        "operation": f"match {num_tokens:,} tokens in {POOL:,} blocks",
        "median_ms": median,
        "p90_ms": p90,
        "baseline": "chained SHA-256 and dictionary",
        "baseline_ms": theirs,
        "ratio": theirs / median,
    }


def bench_evict(runs: int) -> dict[str, Any]:
    state = filled_cache(np.arange(BLOCK, dtype=np.int32)[None])
    need = int(state.pool.num_free) + 1_024
    reserve = jax.jit(partial(paged.reserve, max_count=1_024), donate_argnums=0)
    times = []
    for _ in range(runs):
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        after, ok = jax.block_until_ready(reserve(fresh, need))
        times.append((time.perf_counter() - start) * 1e3)
        assert ok and int(after.pool.num_free) == need
    times = sorted(times[1:])
    return {
        "operation": f"evict 1,024 of {POOL:,} blocks",
        "median_ms": statistics.median(times),
        "p90_ms": times[int(0.9 * (len(times) - 1))],
    }


def _steps(num_blocks: int) -> dict[str, tuple[Callable, Callable, tuple]]:
    """Each operation, one that takes it back, and what they begin with."""
    seats = jnp.arange(SEQS, dtype=jnp.int32)
    half = SEQS // 2

    def held(rows: int) -> tuple[paged.CacheState, paged.BlockTables]:
        state, tables = paged.init_cache(num_blocks, BLOCK), paged.init_tables(SEQS, COLUMNS)
        lens = jnp.where(seats < rows, 8 * BLOCK, 0)
        state, tables, ok = paged.append(state, tables, lens, 8)
        assert ok
        return state, tables

    nine, eight = jnp.full(SEQS, 9 * BLOCK, jnp.int32), jnp.full(SEQS, 8 * BLOCK, jnp.int32)
    pool, ids, _ = paged.allocate(paged.init_pool(num_blocks), SEQS, SEQS)
    return {
        "allocate": (
            lambda pool, _: paged.allocate(pool, SEQS, SEQS),
            lambda pool, ids: (paged.decref(pool, ids)[0], ids),
            (paged.init_pool(num_blocks), jnp.zeros(SEQS, jnp.int32)),
        ),
        "fork": (
            lambda state, tables: paged.fork(state, tables, seats[:half], seats[half:]),
            lambda state, tables: paged.release(state, tables, seats[half:])[:2],
            held(half),
        ),
        "decref": (
            lambda pool, ids: (paged.decref(pool, ids)[0], ids, jnp.bool_(True)),
            lambda pool, _: paged.allocate(pool, SEQS, SEQS)[:2],
            (pool, ids),
        ),
        "append": (
            lambda state, tables: paged.append(state, tables, nine, 1),
            lambda state, tables: paged.truncate(state, tables, seats, eight)[:2],
            held(SEQS),
        ),
    }


def bench_pool_sizes(runs: int) -> list[dict[str, Any]]:
    """Operations on 256 sequences, donated, in a small and a large pool, in turn."""
    rows = []
    small, large = _steps(SMALL), _steps(LARGE)
    for name in small:
        times: dict[int, list[float]] = {SMALL: [], LARGE: []}
        programs, values = {}, {}
        for size, steps in ((SMALL, small), (LARGE, large)):
            do, undo, values[size] = steps[name]
            programs[size] = tuple(jax.jit(f, donate_argnums=(0, 1)) for f in (do, undo))
        for i in range(runs + 5):
            for size, (do, undo) in programs.items():
                jax.block_until_ready(values[size])
                start = time.perf_counter()
                *value, ok = jax.block_until_ready(do(*values[size]))
                # The first compile, and warm up.
                times[size] += [(time.perf_counter() - start) * 1e3] if i >= 5 else []
                assert ok
                values[size] = undo(*value)
        median = {size: statistics.median(took) for size, took in times.items()}
        rows.append(
            {
                "operation": f"{name}, {SEQS} sequences, {LARGE:,} blocks",
                "median_ms": median[LARGE],
                "p90_ms": sorted(times[LARGE])[int(0.9 * (runs - 1))],
                "baseline": f"{SMALL:,} blocks",
                "baseline_ms": median[SMALL],
                "ratio": median[LARGE] / median[SMALL],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the block manager.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [bench_match(1_024, args.runs), bench_match(131_072, args.runs)]
    rows += [bench_evict(args.runs), *bench_pool_sizes(4 * args.runs)]
    for row in rows:
        beside = (
            f"  {row['baseline']}: {row['baseline_ms']:.3f} ms, ratio {row['ratio']:.2f}"
            if "baseline" in row
            else ""
        )
        print(
            f"{row['operation']:45s} {row['median_ms']:8.3f} ms (p90 {row['p90_ms']:.3f}){beside}"
        )
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        device = f"{platform.processor() or platform.machine()}, {jax.devices()[0].device_kind}"
        about = {"device": device, "jax": jax.__version__, "commit": commit, "runs": args.runs}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
