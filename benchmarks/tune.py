"""Find the attention kernels' fastest knobs on the device at hand, and write them as JSON.

    python benchmarks/tune.py --out tuned.json         # decode and prefill, usual shapes
    python benchmarks/tune.py --kernel decode --heads 64 --kv-heads 8 --head-size 128
    python benchmarks/tune.py --dry-run                # two knobs at a tiny shape, on any CPU

Each knob is moved alone from the best so far, starting from the heuristic's, until no move is
faster. A setting is kept only if it beats the heuristic's by `--margin`. Use the file with
`kernel_tuning(Tuning.from_json(text))`, or as octavo's own `pallas_kernels/tuned.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_problems
import jax
from gpu_problems import Problem, Shape

from octavo import pallas_kernels as ops
from octavo.pallas_kernels import CHIPS, Interpretation, Tuning, interpret_kernels, kernel_tuning
from octavo.pallas_kernels.chips import current_chip
from octavo.pallas_kernels.tuning import recorded_knobs

# What each knob may be; whatever a kernel refuses is passed over.
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "mosaic_gpu.decode": {
        "tile": (32, 64, 128),
        "stages": (2, 3, 4, 6),
        "splits": (1, 2, 4, 8, 16, 32, 64),
    },
    "mosaic_gpu.tiles": {"rows": (64, 128, 192), "block_kv": (64, 96, 128), "stages": (2, 3, 4)},
    "mosaic_tpu.decode": {
        "chunk_tokens": (128, 256, 512, 1024, 2048),
        "tail_tokens": (64, 128, 256),
    },
    "mosaic_tpu.tiles": {
        "tile_queries": (64, 128, 256, 512),
        "chunk_tokens": (256, 512, 1024),
        "lanes": (128, 256, 512),
    },
}
KERNELS = {"decode": "decode", "prefill": "tiles"}


def timed(problem: Problem, platform: str, tuning: Tuning, rounds: int) -> float:
    """Median seconds of one call under a tuning."""

    @jax.jit
    def attend(q: jax.Array, kv_cache: jax.Array) -> jax.Array:
        return ops.paged_attention(
            q,
            kv_cache,
            problem.block_tables,
            problem.context_lens,
            problem.query_start,
            max_query_len=problem.shape.queries,
            k_scale=problem.k_scale,
            v_scale=problem.v_scale,
            implementation=f"mosaic_{platform}",
        )[0]

    with kernel_tuning(tuning):
        jax.block_until_ready(attend(problem.q, problem.kv_cache))
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            calls = [attend(problem.q, problem.kv_cache) for _ in range(10 if rounds > 1 else 1)]
            jax.block_until_ready(calls)
            times.append((time.perf_counter() - begin) / len(calls))
    return statistics.median(times)


def entry(kernel: str, chip: str, shape: Shape, knobs: dict[str, Any]) -> dict[str, Any]:
    when = {
        "num_kv_heads": shape.kv_heads,
        "groups": shape.heads // shape.kv_heads,
        "head_size": shape.head_size,
        "block_size": shape.block_size,
        "dtype": shape.dtype,
    }
    if kernel.endswith("gpu.decode"):
        when["num_seqs"] = shape.seqs
    return {"kernel": kernel, "chip": chip, "when": when, "knobs": knobs}


def tune(shape: Shape, platform: str, kernel: str, *, margin: float, rounds: int, most: int) -> Any:
    """The best entry for one shape, or None if the heuristic's knobs are as good."""
    problem = gpu_problems.make(shape, platform=platform)
    chip = current_chip().name

    def seconds(knobs: dict[str, Any]) -> float:
        text = json.dumps([entry(kernel, chip, shape, knobs)])
        try:
            return timed(problem, platform, Tuning.from_json(text), rounds)
        except (NotImplementedError, ValueError) as error:
            print(f"    {knobs}: refused: {error}")
        except jax.errors.JaxRuntimeError as error:  # too much shared memory, or registers
            print(f"    {knobs}: {str(error).splitlines()[0]}")
        return float("inf")

    with recorded_knobs() as used:
        heuristic_seconds = timed(problem, platform, Tuning(), rounds)
    heuristic = dataclasses.asdict(used[kernel])
    print(f"{kernel}, {shape.name}: heuristic {heuristic}: {heuristic_seconds * 1e3:.4g} ms")
    best, best_seconds, tried, moved = dict(heuristic), heuristic_seconds, 0, True
    while moved and tried < most:
        moved = False
        for knob, values in CANDIDATES[kernel].items():
            for value in values:
                if value == best[knob] or tried >= most:
                    continue
                tried += 1
                candidate = best | {knob: value}
                took = seconds(candidate)
                if took < best_seconds:
                    print(f"    {knob}={value}: {took * 1e3:.4g} ms")
                    best, best_seconds, moved = candidate, took, True
    if heuristic_seconds / best_seconds < 1 + margin:
        return None
    changed = {knob: value for knob, value in best.items() if value != heuristic[knob]}
    gain = heuristic_seconds / best_seconds
    print(f"    best: {changed}: {best_seconds * 1e3:.4g} ms, {gain:.2f} x as fast")
    return entry(kernel, chip, shape, changed)


def shapes(args: argparse.Namespace, kind: str) -> Iterator[Shape]:
    heads = {
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_size": args.head_size,
        "block_size": args.block_size,
        "dtype": args.dtype,
    }
    if args.dry_run:
        queries = 1 if kind == "decode" else 24
        yield Shape(seqs=2, context=40, queries=queries, **heads)
    elif kind == "decode":
        for seqs, context in ((1, 131_072), (8, 8192), (64, 4096), (256, 1024)):
            yield Shape(seqs=seqs, context=context, **heads)
    else:
        yield Shape(seqs=1, context=8192, queries=8192, **heads)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="may be repeated")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--margin", type=float, default=0.03, help="gain that is worth an entry")
    parser.add_argument("--out", type=Path, help="file to write; existing entries stay behind")
    parser.add_argument("--dry-run", action="store_true", help="interpret a TPU's kernels")
    args = parser.parse_args()
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    platform, rounds, most = jax.default_backend(), 5, 60
    if args.dry_run:
        context = interpret_kernels(Interpretation(chip=CHIPS["TPU v6 lite"], mode="generic"))
        platform, rounds, most = "tpu", 1, 2
    elif platform not in ("gpu", "tpu"):
        parser.error(f"no device to tune here: JAX runs on {platform} (--dry-run needs none)")
    found = []
    with context:
        for kind in args.kernel or KERNELS:
            kernel = f"mosaic_{platform}.{KERNELS[kind]}"
            for shape in shapes(args, kind):
                settings = {"margin": args.margin, "rounds": rounds, "most": most}
                if (row := tune(shape, platform, kernel, **settings)) is not None:
                    found.append(row)
    if args.out and not args.dry_run:
        old = json.loads(args.out.read_text()) if args.out.exists() else []
        args.out.write_text(json.dumps(found + old, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
