"""How much of a decode step the host takes, beside the model's own time on the device.

    python benchmarks/host_time.py [--model smollm2] [--batch 16] [--prompt 512] [--tokens 96] \
        [--repeats 5] [--json FILE]

A batch decodes; the time inside the model's dispatches, from call to tokens, is the device's, all
else that the engine does between two of them is the host's: reserving and publishing blocks,
taking tokens, making text. Medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from octavo.models import load_model
from octavo.serve import Engine, EngineConfig, SamplingParams


def measure(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Milliseconds of a decode step: all of it, and the host's part."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    runner = engine._runner
    decode, in_device, done = runner.decode, 0.0, 0

    def timed(requests, num_steps):
        nonlocal in_device, done
        begin = time.perf_counter()
        drawn = decode(requests, num_steps)
        in_device += time.perf_counter() - begin
        done += int((drawn.tokens >= 0).any(axis=1).sum())
        return drawn

    runner.decode = timed
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
        runner.decode = decode
    host = total - in_device
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

    engine = Engine(load_model(args.model), EngineConfig(max_num_seqs=args.batch))
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(1 + args.repeats):  # the first compiles
        prompts = rng.integers(1000, 40000, (args.batch, args.prompt)).tolist()
        runs.append(measure(engine, prompts, args.tokens))
    found = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
    print(
        f"batch {args.batch} at {args.prompt}: {found['step_ms']:.1f} ms a step, of which the host"
        f" {found['host_ms']:.2f} ms ({found['host_share']:.1%})"
    )
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib")}
        about |= {"python": platform.python_version()}
        args.json.write_text(json.dumps({"about": about | vars(args), **found}, default=str) + "\n")


if __name__ == "__main__":
    main()
