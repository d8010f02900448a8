"""What keeping blocks in host memory costs those who decode meanwhile.

    python benchmarks/tier_overhead.py [--model smollm2] [--batch 8] [--prompt 512] [--tokens 96] \
        [--repeats 5] [--json FILE]

Two engines in one process take turns, one with a host tier and one without, each with a pool so
small that every batch evicts the one before. Times are those of decode steps alone; every block
that fills in them is copied to host memory. Exits with 1 if that takes more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from octavo.models import LoadedModel, load_model
from octavo.serve import Engine, EngineConfig, SamplingParams

MOST = 0.05
BLOCK = 16


def new_engine(loaded: LoadedModel, args: argparse.Namespace, host_gib: float) -> Engine:
    per_request = -(-(args.prompt + args.tokens) // BLOCK)
    config = EngineConfig(
        num_blocks=args.batch * per_request + 8,
        block_size=BLOCK,
        max_num_seqs=args.batch,
        max_model_len=args.prompt + args.tokens + BLOCK,
        host_cache_gib=host_gib,
        restore_policy="always",
    )
    return Engine(loaded, config)


def decode_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of all steps in which nothing but decoding is done."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, params)
    total = 0.0
    while engine.num_unfinished:
        before = engine._count["prefilled_tokens"]
        begin = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin
        only_decoded = engine._count["prefilled_tokens"] == before
        total += seconds if only_decoded else 0.0
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loaded = load_model(args.model)
    engines = {"without": new_engine(loaded, args, 0), "with": new_engine(loaded, args, 2.0)}
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        prompts = rng.integers(1000, 40_000, (args.batch, args.prompt)).tolist()
        for name, engine in engines.items():
            seconds = decode_seconds(engine, prompts, args.tokens)
            if repeat:  # the first one compiles
                times[name].append(seconds)
    stats = engines["with"].stats()
    assert stats.tiers["host"].num_blocks > stats.num_blocks, "nothing was kept below"
    ratios = [b / a for a, b in zip(times["without"], times["with"], strict=True)]
    ratio = statistics.median(ratios)
    saved = args.batch * args.tokens // BLOCK
    print(
        f"decoding {args.batch} x {args.tokens} tokens, {saved} blocks filled: "
        f"{statistics.median(times['without']):.3f} s without, "
        f"{statistics.median(times['with']):.3f} s with a host tier, ratio {ratio:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    if args.json:
        found = {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
            "seconds": times,
            "ratio": ratio,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for engine in engines.values():
        engine.close()
    return 1 if ratio > 1 + MOST else 0


if __name__ == "__main__":
    sys.exit(main())
