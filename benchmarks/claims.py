"""The classic claims of paged attention and prefix reuse, beside what was published.

    python benchmarks/claims.py [--only waste,sharing,reuse] [--repeats 3] [--quick]

- `waste`: how much of the cache's memory holds tokens, paged and reserved in one piece.
- `sharing`: memory saved in parallel sampling and in beam search.
- `reuse`: throughput with and without prefix caching, few-shot, in chats and in trees of thoughts.

Writes `claims.json` and `claims.md` into `--out`. What must hold whatever the machine, such as
equal answers with and without reuse, is checked, and the exit status is 1 if it does not. `--quick`
checks it in seconds on a small model with random weights, and measures nothing worth keeping.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from claims_reuse import Sizes, measure_reuse
from claims_sharing import BEAMS, SAMPLED, Load, measure_sharing
from claims_table import as_markdown
from claims_texts import INSTRUCTIONS, passage
from claims_waste import measure_waste
from engine_soak import small_model

from octavo.models import LoadedModel, load_model
from octavo.serve import Engine, EngineConfig

PARTS = ("waste", "sharing", "reuse")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        num_requests, num_slots: of `waste`.
        widths: of `sharing`, where `num_instructions` prompts are asked, with `answer_tokens`, and
            `num_passages`, with `long_answer_tokens`.
        sizes, repeats: of `reuse`.
        settings: of the engines.
        num_branches: sequences at once in `sharing`.
        warm: whether engines are warmed up before anything is timed.
    """

    num_requests: int = 500
    num_slots: int = 16_384
    widths: tuple[int, ...] = (2, 4, 6)
    num_instructions: int = 6
    answer_tokens: int = 58  # the means of Alpaca and ShareGPT, by Kwon et al., figure 11
    num_passages: int = 2
    passage_tokens: int = 161
    long_answer_tokens: int = 338
    sizes: Sizes = field(default_factory=Sizes)
    repeats: int = 3
    settings: EngineConfig
    num_branches: int = 36
    warm: bool = True


FULL = Scale(
    settings=EngineConfig(
        num_blocks=1200, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256
    )
)
QUICK = Scale(
    num_requests=40,
    num_slots=4096,
    widths=(2, 3),
    num_instructions=2,
    answer_tokens=24,
    num_passages=0,
    sizes=Sizes(num_questions=3, num_conversations=2, num_turns=2, num_levels=2),
    repeats=1,
    settings=EngineConfig(
        num_blocks=400,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        compilation_cache_dir="",
    ),
    num_branches=8,
    warm=False,
)


def waste(scale: Scale) -> dict[str, Any]:
    """Shares of memory, by how it is given out."""
    shares = measure_waste(scale.num_requests, scale.num_slots)
    return {"num_requests": scale.num_requests, "num_slots": scale.num_slots, "shares": shares}


def sharing(loaded: LoadedModel, scale: Scale) -> dict[str, Any]:
    """Blocks saved, by load, way and width."""
    # Every step is seen.
    config = replace(scale.settings, max_num_seqs=scale.num_branches, max_decode_steps=1)
    tokenizer, loads = loaded.tokenizer, []
    if asked := INSTRUCTIONS[: scale.num_instructions]:
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in asked]
        loads.append(Load(name="instructions", prompts=prompts, num_tokens=scale.answer_tokens))
    if scale.num_passages:
        length = scale.passage_tokens
        texts = [passage(tokenizer, i, length) for i in range(scale.num_passages)]
        prompts = [tokenizer.encode(text, add_special_tokens=False)[:length] for text in texts]
        loads.append(Load(name="chat", prompts=prompts, num_tokens=scale.long_answer_tokens))
    return measure_sharing(Engine(loaded, config), loads, scale.widths)


def reuse(loaded: LoadedModel, scale: Scale) -> dict[str, Any]:
    """Throughput and hit rate, by workload."""
    off = Engine(loaded, replace(scale.settings, enable_prefix_caching=False))
    on = Engine(loaded, scale.settings)
    if scale.warm:
        for engine in (off, on):
            engine.warmup()
    found = measure_reuse(off, on, scale.sizes, scale.repeats)
    return {name: {**asdict(row), "speedup": row.speedup} for name, row in found.items()}


def faults(found: dict[str, Any]) -> list[str]:
    """What does not hold of that which must."""
    wrong = []
    if "waste" in found:
        shares = found["waste"]["shares"]
        used = [shares[name]["used"] for name in ("max", "pow2", "oracle", "paged")]
        if used != sorted(used) or used[-1] < 2 * used[-2]:
            wrong.append(f"used shares are {used}, and should rise, twofold in the end")
        if shares["paged"]["internal"] > 0.04:
            wrong.append(f"the last blocks waste {shares['paged']['internal']:.1%}: above 4 %")
    for load, ways in found.get("sharing", {}).items():
        for way, by_width in ways.items():
            saved = list(by_width.values())
            if not 0 < saved[0] < saved[-1] < 1:
                wrong.append(f"{load}, {way}: {saved} saved, which should grow with the width")
        if any(ways[BEAMS][width] <= ways[SAMPLED][width] for width in ways[BEAMS]):
            wrong.append(f"{load}: beams should share more than samples, which part for good")
    for name, row in found.get("reuse", {}).items():
        if not row["equal"]:
            wrong.append(f"{name}: answers differ with and without reuse")
        if not row["hit_rate"] > 0.3 or not row["computed_on"] < 0.7 * row["computed_off"]:
            wrong.append(f"{name}: a hit rate of {row['hit_rate']:.2f} is no reuse")
    return wrong


def environment(model: str) -> dict[str, Any]:
    """Device, versions and commit."""
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "model": model,
        "device": f"{os.cpu_count()} CPUs, {name or platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("octavo", "jax", "flax")},
        "commit": head.stdout.strip() or None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="times that reuse is measured")
    parser.add_argument("--quick", action="store_true", help="check in seconds, measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if args.repeats < 1:
        parser.error(f"--repeats: {args.repeats} must be at least 1")
    if args.quick and args.out == RESULTS:
        parser.error("--quick measures nothing worth keeping: name a folder with --out")

    loaded, scale = load_model(args.model), replace(FULL, repeats=args.repeats)
    if args.quick:
        loaded, scale = small_model(loaded, max_context_len=1024), QUICK
    measures = {
        "waste": lambda: waste(scale),
        "sharing": lambda: sharing(loaded, scale),
        "reuse": lambda: reuse(loaded, scale),
    }
    begin, found = time.perf_counter(), {}
    for part in parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        found[part] = measures[part]()
    about = {**environment(args.model), "seconds": time.perf_counter() - begin}
    text = as_markdown(about, found)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "claims.json").write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
    (args.out / "claims.md").write_text(text)
    print(text)
    wrong = faults(found)
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
