"""How much of a decode step the host takes, with loops one after the other and dispatched ahead.

    python benchmarks/host_time.py [--model smollm2] [--batch 16] [--prompt 512] [--tokens 96] \
        [--repeats 5] [--json FILE]

A batch decodes. The host's time is all that passes but for what it spends waiting for tokens:
reserving and publishing blocks, dispatching, taking tokens, making text. Where loops are dispatched
one after the other the device is idle in that time; where they are dispatched ahead it is not, as
far as it has processors of its own. Two engines take turns; medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from octavo.models import load_model
from octavo.serve import Engine, EngineConfig, SamplingParams

WAYS = {"one after the other": False, "ahead": True}


def measure(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Milliseconds of a decode step: all of it, and the host's part."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    runner = engine._runner
    fetch, waited, done = runner.fetch, 0.0, 0

    def timed(loop: Any) -> Any:
        nonlocal waited, done
        begin = time.perf_counter()
        drawn = fetch(loop)
        waited += time.perf_counter() - begin
        done += int((drawn.tokens >= 0).any(axis=1).sum())
        return drawn

    runner.fetch = timed
    try:
        for prompt in prompts:
            engine.add_request(prompt, params)
        total = 0.0
        while engine.num_unfinished:
            before, begin = done, time.perf_counter()
            engine.step()
            if done > before:
                total += time.perf_counter() - begin
    finally:
        runner.fetch = fetch
    host = total - waited
    return {
        "step_ms": total / done * 1e3,
        "host_ms": host / done * 1e3,
        "host_share": host / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    loaded = load_model(args.model)
    engines = {
        name: Engine(loaded, EngineConfig(max_num_seqs=args.batch, async_scheduling=ahead))
        for name, ahead in WAYS.items()
    }
    rng = np.random.default_rng(0)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(1 + args.repeats):  # the first compiles
        prompts = rng.integers(1000, 40000, (args.batch, args.prompt)).tolist()
        for name, engine in engines.items():
            runs[name].append(measure(engine, prompts, args.tokens))
    found = {}
    for name, own in runs.items():
        found[name] = {key: statistics.median(run[key] for run in own[1:]) for key in own[0]}
        print(
            f"batch {args.batch} at {args.prompt}, {name}: {found[name]['step_ms']:.1f} ms a step, "
            f"of which the host {found[name]['host_ms']:.2f} ms ({found[name]['host_share']:.1%})"
        )
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        about |= {"python": platform.python_version()}
        written = {"about": about | vars(args), **found}
        args.json.write_text(json.dumps(written, default=str, indent=1) + "\n")


if __name__ == "__main__":
    main()
