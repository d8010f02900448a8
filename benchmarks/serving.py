"""Prefill, decode, time to first token and bursts, of octavo and of its peers in one run.

    python benchmarks/serving.py --model smollm2 [--repeats 5] [--only decode] [--json FILE] \
        [--peer NAME=PYTHON:ENGINE:MODEL[:OPTION ...]] ... [--skip NAME:WHAT] ...

Each engine lives in a process of its own (`serving_workers.py`) and they take turns, measurement by
measurement, so that a busy moment of the machine meets all. They pause in between: vLLM's worker
keeps a core busy for a second after its last step, at the cost of whoever comes next. Same prompts
for all: random token ids that nobody has seen, greedy. A peer is named, with the Python that has
it, its kind and its model (of transformers and vllm a directory, which `peer_model.py` makes, of
llama.cpp a GGUF file):

    --peer hf=torch-env/bin/python:transformers:smollm2-hf
    --peer vllm=vllm-env/bin/python:vllm:smollm2-hf
    --peer llama-f32=python3:llama.cpp:smollm2-f32.gguf:llama-env/bin/llama-server
    --peer llama-q4=python3:llama.cpp:smollm2-q4_1.gguf:llama-env/bin/llama-server
    --peer octavo-int8=python3:octavo:smollm2:'quantization="int8"'
    --peer octavo-w8a8=python3:octavo:smollm2:'quantization="w8a8"'

Prints medians, octavo's ratio to the best peer (above 1 octavo is better), and which of the targets
are met (by float32, or int8 where the target says so); names are those above.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

WORKERS = Path(__file__).with_name("serving_workers.py")
NUM_DECODED = 33
PAUSE_S = 1.5


class Worker:
    """An engine's process."""

    def __init__(self, name: str, python: str, engine: str, model: str, options: list[str]):
        self.name = name
        self._process = subprocess.Popen(
            [python, str(WORKERS), engine, model, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """What the engine answers; see `serving_workers.py`."""
        assert self._process.stdin is not None
        request = {"prompts": prompts, "max_tokens": max_tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        counts = {len(tokens) for tokens in answer["tokens"]}
        if counts != {max_tokens}:
            raise RuntimeError(f"{self.name} gave {counts} tokens where {max_tokens} were wanted")
        return answer

    def close(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()


class Prompts:
    """Token ids that no engine has seen, the same for all engines in one measurement."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def fresh(self, length: int) -> list[int]:
        return self._rng.integers(1000, 40000, length).tolist()

    def sharing(self, count: int, prefix: list[int], own: int) -> list[list[int]]:
        return [[*prefix, *self.fresh(own)] for _ in range(count)]


@dataclass(frozen=True)
class Prefill:
    length: int
    name: str = "prefill"
    unit: str = "tok/s"

    @property
    def label(self) -> str:
        return f"prefill {self.length}"

    def measure(self, worker: Worker, prompts: Prompts) -> dict[str, float]:
        answer = worker.generate([prompts.fresh(self.length)], 1)
        return {self.label: self.length / answer["first"][0]}


@dataclass(frozen=True)
class Decode:
    batch: int
    length: int
    name: str = "decode"
    unit: str = "tok/s"

    @property
    def label(self) -> str:
        return f"decode {self.batch} at {self.length}"

    def measure(self, worker: Worker, prompts: Prompts) -> dict[str, float]:
        asked = [prompts.fresh(self.length) for _ in range(self.batch)]
        answer = worker.generate(asked, NUM_DECODED)
        # From when all have begun; what came before is not all decode.
        begin = next(x for x in answer["progress"] if x[0] >= max(answer["first"]))
        end = answer["progress"][-1]
        rate = (end[1] - begin[1]) / (end[0] - begin[0])
        return {self.label: rate}


@dataclass(frozen=True)
class FirstToken:
    prefix: int
    own: int
    name: str = "ttft"
    unit: str = "s"

    @property
    def label(self) -> str:
        return f"ttft {self.prefix} + {self.own}"

    def measure(self, worker: Worker, prompts: Prompts) -> dict[str, float]:
        both = prompts.sharing(2, prompts.fresh(self.prefix), self.own)
        cold, warm = (worker.generate([prompt], 1)["first"][0] for prompt in both)
        return {f"{self.label} cold": cold, f"{self.label} warm": warm}


@dataclass(frozen=True)
class Burst:
    count: int
    prefix: int
    own: int
    output: int
    name: str = "burst"
    unit: str = "s"

    @property
    def label(self) -> str:
        return f"burst {self.count} x ({self.prefix} + {self.own})"

    def measure(self, worker: Worker, prompts: Prompts) -> dict[str, float]:
        prefix = prompts.fresh(self.prefix)
        seconds = [
            worker.generate(prompts.sharing(self.count, prefix, self.own), self.output)
            for _ in range(2)
        ]
        cold, warm = (answer["progress"][-1][0] for answer in seconds)
        return {f"{self.label} cold": cold, f"{self.label} warm": warm}


MEASUREMENTS = (
    Prefill(512),
    Prefill(2048),
    Prefill(8100),
    Decode(1, 512),
    Decode(8, 512),
    FirstToken(512, 32),
    FirstToken(2048, 32),
    FirstToken(8128, 32),
    Burst(32, 1024, 32, 64),
    Burst(32, 4096, 32, 64),
)
UNITS = {m.name: m.unit for m in MEASUREMENTS}


@dataclass(frozen=True)
class Target:
    """What octavo, or its `own` variant, must reach: `ratio` times the best of `peers`."""

    what: str
    ratio: float
    peers: tuple[str, ...] = ("hf", "vllm", "llama-f32", "llama-q4")
    own: str = "octavo"


TARGETS = (
    Target("prefill 512", 1.2),
    Target("prefill 2048", 1.2),
    Target("prefill 8100", 1.5),
    Target("decode 1 at 512", 1.0, ("llama-f32",)),
    Target("decode 1 at 512", 1.0, ("llama-q4",), "octavo-int8"),
    Target("decode 8 at 512", 2.0),
    Target("ttft 2048 + 32 warm", 2.0),
    Target("ttft 8128 + 32 warm", 2.0),
    Target("burst 32 x (1024 + 32) cold", 1 / 0.6, ("vllm",)),
    Target("burst 32 x (1024 + 32) warm", 1 / 0.5, ("vllm",)),
    Target("burst 32 x (4096 + 32) cold", 1 / 0.5, ("vllm",)),
    Target("burst 32 x (4096 + 32) warm", 1 / 0.5, ("vllm",)),
)


def ratio_to_best(what: str, own: float, peers: list[float]) -> float:
    """How many times better than the best of the peers."""
    return min(peers) / own if UNITS[what.split()[0]] == "s" else own / max(peers)


def table(medians: dict[str, dict[str, float]], names: list[str]) -> list[str]:
    """Lines of Markdown: medians, and octavo's ratio to the best of those that are not octavo."""
    lines = [f"| | {' | '.join(names)} | ratio |", "|---" * (len(names) + 2) + "|"]
    for what, by_name in medians.items():
        peers = [value for name, value in by_name.items() if not name.startswith("octavo")]
        ratio = f"{ratio_to_best(what, by_name['octavo'], peers):.2f}" if peers else ""
        cells = [f"{by_name[name]:.3g}" if name in by_name else "" for name in names]
        lines.append(f"| {what}, {UNITS[what.split()[0]]} | {' | '.join(cells)} | {ratio} |")
    return lines


def verdicts(medians: dict[str, dict[str, float]]) -> list[str]:
    """Lines of Markdown: what was reached of the targets, where all that they name took part.

    What octavo's other variants reached stands beside it and meets nothing.
    """
    lines = [
        "| target | of | against | wanted | reached | | others reach |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        by_name = medians.get(target.what, {})
        peers = {name: by_name[name] for name in target.peers if name in by_name}
        if target.own not in by_name or not peers:
            continue
        ratio = ratio_to_best(target.what, by_name[target.own], list(peers.values()))
        met = "met" if ratio >= target.ratio else "missed"
        others = ", ".join(
            f"{name} {ratio_to_best(target.what, value, list(peers.values())):.2f}"
            for name, value in by_name.items()
            if name.startswith("octavo") and name != target.own
        )
        cells = [target.what, target.own, ", ".join(peers), f"{target.ratio:.2f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join([*cells, met, others])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--option", action="append", default=[], help="name=value of EngineConfig")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        help="NAME:WHAT, as llama-q4:burst or hf:prefill 8100",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="kinds of measurement, separated by commas")
    parser.add_argument("--longest", type=int, default=1 << 20, help="prompts of at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = set(args.only.split(",")) if args.only else set(UNITS)
    if unknown := kinds - UNITS.keys():
        parser.error(f"no measurement is called {unknown.pop()}; there are {', '.join(UNITS)}")

    workers = [Worker("octavo", sys.executable, "octavo", args.model, args.option)]
    try:
        for peer in args.peer:
            name, _, rest = peer.partition("=")
            python, engine, model, *options = rest.split(":")
            workers.append(Worker(name, python, engine, model, options))
        found: dict[str, dict[str, list[float]]] = {}
        for number, measurement in enumerate(MEASUREMENTS):
            size = max(getattr(measurement, "length", 0), getattr(measurement, "prefix", 0))
            if measurement.name not in kinds or size > args.longest:
                continue
            repeats = min(args.repeats, 3) if size > 4000 else args.repeats
            for repeat in range(-1 if size <= 4000 else 0, repeats):
                for worker in workers:
                    if any(f"{worker.name}:{measurement.label}".startswith(x) for x in args.skip):
                        continue
                    # The first turn warms up and is not counted; of long ones there are fewer.
                    seed = ((args.seed * 1000) + repeat + 1) * 100 + number
                    time.sleep(PAUSE_S)
                    for what, value in measurement.measure(worker, Prompts(seed)).items():
                        if repeat >= 0:
                            found.setdefault(what, {}).setdefault(worker.name, []).append(value)
            latest = {k: v for k, v in found.items() if k.startswith(measurement.label)}
            print(json.dumps(latest), flush=True)
    finally:
        for worker in workers:
            worker.close()
    names = [worker.name for worker in workers]
    medians = {
        what: {name: statistics.median(values) for name, values in by_name.items()}
        for what, by_name in found.items()
    }
    print("\n".join([*table(medians, names), "", *verdicts(medians)]))
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
        about |= {"python": platform.python_version(), "processor": platform.processor()}
        about |= {"peers": {p.partition("=")[0]: p.split(":")[1] for p in args.peer}}
        args.json.write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
