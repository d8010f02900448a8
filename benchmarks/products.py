"""A model's matrix products alone: `linear` and XLA on this CPU beside torch, taking turns.

    python benchmarks/products.py [--torch PYTHON] [--rows 1,2,8,16,32,128,512,2048] [--repeats 7] \
        [--json FILE]

The four products of each of SmolLM2's 30 layers, in float32, every layer with weights of its own,
as no engine can do without. `PYTHON` is one that has torch. Prints the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, MLP = 30, 576, 960, 1536
SHAPES = ((WIDTH, HEADS), (WIDTH, WIDTH), (WIDTH, 2 * MLP), (MLP, WIDTH))
FLOP_PER_ROW = 2 * LAYERS * sum(a * b for a, b in SHAPES)
BYTES = 4 * LAYERS * sum(a * b for a, b in SHAPES)


def weights() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.standard_normal(s, np.float32) / 40 for s in SHAPES] for _ in range(LAYERS)]


def inputs(rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    return [rng.standard_normal((rows, width), np.float32) for width in (WIDTH, MLP)]


def of_jax(implementation: str) -> Callable[[int], Callable[[], object]]:
    import jax
    import jax.numpy as jnp

    from octavo.pallas_kernels import linear, pack_weight

    layers, product = jax.device_put(weights()), partial(linear, implementation=implementation)
    if implementation == "numba":
        layers = [[pack_weight(weight) for weight in layer] for layer in layers]

    @jax.jit
    def run(x, wide, layers):
        # What is added keeps XLA from leaving any of them out.
        for qkv, out, gate_up, down in layers:
            x = x + product(x, qkv)[:, :WIDTH] + product(x, out)
            x = x + product(wide + product(x, gate_up)[:, :MLP], down)
        return x

    def prepare(rows: int) -> Callable[[], object]:
        x, wide = map(jnp.asarray, inputs(rows))
        return lambda: run(x, wide, layers).block_until_ready()

    return prepare


def of_torch() -> Callable[[int], Callable[[], object]]:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)  # it takes one for each core, where XLA takes all
    layers = [[torch.from_numpy(w.T.copy()) for w in layer] for layer in weights()]
    linear = torch.nn.functional.linear

    @torch.inference_mode()
    def run(x, wide):
        for qkv, out, gate_up, down in layers:
            x = x + linear(x, qkv)[:, :WIDTH] + linear(x, out)
            x = x + linear(wide + linear(x, gate_up)[:, :MLP], down)
        return x

    def prepare(rows: int) -> Callable[[], object]:
        x, wide = map(torch.from_numpy, inputs(rows))
        return lambda: run(x, wide)

    return prepare


def serve(prepare: Callable[[int], Callable[[], object]]) -> None:
    """Answer numbers of rows on stdin with milliseconds."""
    made: dict[int, Callable[[], object]] = {}
    for line in sys.stdin:
        rows = int(line)
        if rows not in made:
            made[rows] = prepare(rows)
            made[rows]()
        begin = time.perf_counter()
        made[rows]()
        print(1e3 * (time.perf_counter() - begin), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", choices=("numba", "xla", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--rows", default="1,2,8,16,32,128,512,2048")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.serve:
        return serve(of_torch() if args.serve == "torch" else of_jax(args.serve))
    pythons = dict.fromkeys(("numba", "xla"), sys.executable) | (
        {"torch": args.torch} if args.torch else {}
    )
    processes = {
        name: subprocess.Popen(
            [python, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, python in pythons.items()
    }
    print("| rows | engine | ms | GFLOP/s | weights, GB/s |\n|--:|---|--:|--:|--:|")
    found: dict[str, dict[str, float]] = {}
    for rows in map(int, args.rows.split(",")):
        times: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(args.repeats + 1):
            for name, process in processes.items():
                assert process.stdin is not None and process.stdout is not None
                print(rows, file=process.stdin, flush=True)
                times[name].append(float(process.stdout.readline()))
        found[str(rows)] = {name: min(values[1:]) for name, values in times.items()}
        for name, ms in found[str(rows)].items():
            rate, bandwidth = FLOP_PER_ROW * rows / ms / 1e6, BYTES / ms / 1e6
            print(f"| {rows} | {name} | {ms:.1f} | {rate:.0f} | {bandwidth:.1f} |", flush=True)
    for process in processes.values():
        process.terminate()
    if args.json:
        args.json.write_text(json.dumps({"milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
