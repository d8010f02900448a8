"""From the start of a process to its first token, with and without kept programs.

    python benchmarks/cold_start.py [--model smollm2] [--repeats 5] [--json FILE] \
        [--folder FOLDER]

Every start is a process of its own: it imports what `octavo serve` imports, loads the model, makes
the engine, compiles or loads all its programs and generates one token. The first start finds an
empty folder (unless one is given), the others what it has left. Medians of these; the processor's
seconds beside those of the clock say how much of a time is waiting for other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PHASES = ("import", "load model", "make engine", "programs", "first token")


def child(model: str, folder: str, begin: float) -> dict[str, float]:
    """Start here, in a fresh process; seconds of each phase, by the clock and by the processor."""
    found: dict[str, float] = {}
    wall, cpu = begin, 0.0

    def done(phase: str) -> None:
        nonlocal wall, cpu
        now, used = time.time(), time.process_time()
        found[phase], found[f"{phase}, cpu"] = now - wall, used - cpu
        wall, cpu = now, used

    import octavo.serve.cli  # noqa: F401
    from octavo.models import load_model
    from octavo.serve import Engine, EngineConfig, SamplingParams

    done("import")
    loaded = load_model(model)
    done("load model")
    engine = Engine(loaded, EngineConfig(compilation_cache_dir=folder))
    done("make engine")
    found["num_programs"] = engine.warmup()
    done("programs")
    next(engine.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=4)))
    done("first token")
    found["num_compiled"] = engine.num_programs - engine._runner.num_loaded
    for kind in ("", ", cpu"):
        found[f"all{kind}"] = sum(found[phase + kind] for phase in PHASES)
    return found


def start(model: str, folder: str) -> dict[str, float]:
    """Run `child` in a process that uses the folder and no other."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    # Set last of all, also where an installation sets a folder of its own.
    code = (
        "import jax, json, sys; jax.config.update('jax_compilation_cache_dir', None);"
        "from cold_start import child;"
        "print(json.dumps(child(sys.argv[1], sys.argv[2], float(sys.argv[3]))))"
    )
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, model, folder, repr(time.time())]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(cold: dict[str, float] | None, warm: dict[str, float]) -> str:
    """Phases in rows, as Markdown."""
    lines = ["| | first start | CPU | later start | CPU |", "|---|---|---|---|---|"]
    for phase in (*PHASES, "all"):
        cells = [
            "" if run is None else f"{run[phase + kind]:.2f} s"
            for run in (cold, warm)
            for kind in ("", ", cpu")
        ]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="with programs of an earlier run, if any")
    args = parser.parse_args()

    cold, warm = None, []
    with tempfile.TemporaryDirectory() as fresh:
        folder = str(args.folder or fresh)
        for i in range(1 + args.repeats):
            run = start(args.model, folder)
            print(
                f"start {i}: {run['all']:.1f} s, {run['all, cpu']:.1f} s of the processor,", end=""
            )
            print(f" {run['num_compiled']:.0f} of {run['num_programs']:.0f} programs compiled")
            if run["num_compiled"]:
                cold = run
            else:
                warm.append(run)
    median = {key: statistics.median(run[key] for run in warm) for key in warm[0]}
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(table(cold, median))
    if args.json:
        about: dict[str, object] = {n: metadata.version(n) for n in ("jax", "jaxlib", "flax")}
        about |= {"python": platform.python_version(), "machine": platform.machine()}
        about |= {"cores": os.cpu_count(), "load_average": os.getloadavg(), "model": args.model}
        result = {"about": about, "first": cold, "later_median": median, "later": warm}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
