"""How much faster a quantised model decodes than the same one in float32.

    python benchmarks/quantized_decode.py [--model smollm2] [--quantization int8] [--prompt 512] \
        [--tokens 48] [--repeats 5] [--batch 1 --batch 8] [--json FILE]

Both engines stand in one process and take turns; prompts are found in the cache, so that what is
timed is decoding. Wall time and the process's CPU time per step, medians over the repeats. On a
machine that is shared, the ratio of CPU times says more.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from octavo.models import load_model
from octavo.serve import Engine, EngineConfig, SamplingParams


def step_ms(engine: Engine, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Wall and CPU milliseconds of a decode step."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    wall, cpu = time.perf_counter(), time.process_time()
    engine.generate(prompts, params)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall / num_tokens * 1e3, cpu / num_tokens * 1e3


def main() -> None:
    """Measure, print and, if asked to, write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = args.batch or [1, 8]
    config = EngineConfig(max_num_seqs=max(batches), max_num_batched_tokens=512)
    kinds = {"float32": None, args.quantization: args.quantization}
    engines = {k: Engine(load_model(args.model, quantization=q), config) for k, q in kinds.items()}
    rng = np.random.default_rng(0)
    prompts = rng.integers(1000, 40000, (max(batches), args.prompt)).tolist()
    report: dict[str, object] = {
        "model": args.model,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "octavo": metadata.version("octavo"),
    }
    for batch in batches:
        runs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in engines}
        for repeat in range(args.repeats + 1):  # the first compiles and fills the cache
            for kind, engine in engines.items():
                took = step_ms(engine, prompts[:batch], args.tokens)
                if repeat:
                    runs[kind].append(took)
        medians = {kind: np.median(took, axis=0) for kind, took in runs.items()}
        ratios = medians["float32"] / medians[args.quantization]
        report[f"batch_{batch}"] = {
            **{
                kind: {"wall_ms": float(wall), "cpu_ms": float(cpu)}
                for kind, (wall, cpu) in medians.items()
            },
            "times_as_fast": {"wall": float(ratios[0]), "cpu": float(ratios[1])},
        }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
