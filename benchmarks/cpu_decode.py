"""Decode attention on a CPU: Numba's kernel beside XLA's, and the bytes that both must read.

    python benchmarks/cpu_decode.py [--layers 8] [--repeats 20] [--json FILE]

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
SHAPES = ((1, 545), (1, 8192), (8, 545), (32, 1100))  # sequences, tokens of each


def milliseconds(implementation: str, args: tuple, caches: list[jax.Array], repeats: int) -> float:
    """Of one layer, all layers one after the other."""

    @jax.jit
    def layers(q, caches, *lists):
        x = q
        for cache in caches:
            x, _ = paged_attention(
                x / 2 + q, cache, *lists, max_query_len=1, implementation=implementation
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
    print(
        "| sequences | tokens | Numba ms | XLA ms | ratio | Numba GB/s |\n|--:|--:|--:|--:|--:|--:|"
    )
    for num_seqs, length in SHAPES:
        columns = -(-length // BLOCK)
        shape = (num_seqs * columns + 1, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        caches = [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(args.layers)]
        tables = 1 + rng.permutation(num_seqs * columns).reshape(num_seqs, columns)
        q = rng.standard_normal((num_seqs, HEADS, HEAD_SIZE), np.float32)
        lists = (tables, np.full(num_seqs, length), np.arange(num_seqs + 1))
        call = (jnp.asarray(q), *(jnp.asarray(x, jnp.int32) for x in lists))
        ours, xla = (milliseconds(n, call, caches, args.repeats) for n in ("numba", "xla"))
        rate = num_seqs * length * KV_HEADS * 2 * HEAD_SIZE * 4 / ours / 1e6
        rows.append({"seqs": num_seqs, "tokens": length, "numba_ms": ours, "xla_ms": xla})
        print(f"| {num_seqs} | {length} | {ours:.3f} | {xla:.3f} | {xla / ours:.1f} | {rate:.0f} |")
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib", "numba")}
        about |= {"cpus": os.cpu_count()}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
