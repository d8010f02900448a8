"""Attention on a CPU: Numba's kernel beside XLA's, the bytes that decode reads, prefill's FLOP/s.

    python benchmarks/cpu_attention.py [--layers 8] [--repeats 20] [--json FILE]

Every layer has a cache of its own, with blocks in random order, so that nothing is read from the
processor's cache that a model would find in memory. Times are the least of the repeats, by layer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import paged_attention

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 9, 3, 64, 16  # of SmolLM2
# Sequences, tokens of each, how many of these are queries.
SHAPES = (
    *((1, 545, 1), (1, 8192, 1), (8, 545, 1), (32, 1100, 1)),
    *((1, 512, 512), (1, 2048, 512), (1, 8192, 512), (1, 2080, 32), (1, 8160, 32), (8, 545, 5)),
)


def milliseconds(
    implementation: str, queries: int, args: tuple, caches: list[jax.Array], repeats: int
) -> float:
    """Of one layer, all layers one after the other."""

    @jax.jit
    def layers(q, caches, *lists):
        x = q
        for cache in caches:
            x, _ = paged_attention(
                x / 2 + q, cache, *lists, max_query_len=queries, implementation=implementation
            )
        return x

    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        layers(args[0], caches, *args[1:]).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times[1:]) / len(caches)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    print("| sequences | tokens | queries | Numba ms | XLA ms | ratio | Numba |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for num_seqs, length, queries in SHAPES:
        columns = -(-length // BLOCK)
        shape = (num_seqs * columns + 1, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        caches = [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(args.layers)]
        tables = 1 + rng.permutation(num_seqs * columns).reshape(num_seqs, columns)
        q = rng.standard_normal((num_seqs * queries, HEADS, HEAD_SIZE), np.float32)
        starts = np.arange(num_seqs + 1) * queries
        lists = (tables, np.full(num_seqs, length), starts)
        call = (jnp.asarray(q), *(jnp.asarray(x, jnp.int32) for x in lists))
        ours, xla = (
            milliseconds(name, queries, call, caches, args.repeats) for name in ("numba", "xla")
        )
        seen = sum(range(length - queries + 1, length + 1))
        if queries == 1:
            rate = f"{num_seqs * length * KV_HEADS * 2 * HEAD_SIZE * 4 / ours / 1e6:.0f} GB/s"
        else:
            rate = f"{num_seqs * seen * HEADS * HEAD_SIZE * 4 / ours / 1e6:.0f} GFLOP/s"
        row = {"seqs": num_seqs, "tokens": length, "queries": queries}
        rows.append(row | {"numba_ms": ours, "xla_ms": xla})
        cells = (num_seqs, length, queries, f"{ours:.3f}", f"{xla:.3f}", f"{xla / ours:.1f}")
        print("| " + " | ".join(map(str, (*cells, rate))) + " |", flush=True)
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib", "numba")}
        about |= {"cpus": os.cpu_count()}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
