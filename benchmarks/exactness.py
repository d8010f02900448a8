"""Greedy tokens under every setting of the engine, against each prompt alone without a cache.

    python benchmarks/exactness.py [--model smollm2] [--quantization w8a8] \
        [--kv-cache-dtype bfloat16] [--prompts 200] [--longest 4000] [--tokens 8] \
        [--only chunk=64,pool=tight] [--json FILE]

The settings: prefix caching on and off, each request alone and sixteen at once, chunks of 64 and
512 tokens, a pool with room for all and one that forces preemption (alone: eviction), cascade
attention on and off, speculation on and off. Prompts are real text of 1 to `--longest` tokens,
as many short as long ones by ratio, every third with a common beginning. Where blocks are short,
answers are four times as long, so that they take blocks from one another. A table with a line for
each setting counts the tokens that differ; the exit status is 1 if any does. There are
48 settings, each of which answers all prompts: `--prompts` and `--only` make it shorter. What
stands in `--json` of the same code, prompts and versions is not computed again.

Then bits: of the logprobs of the twenty likeliest tokens at every place (all prompts up to a
quarter of `--longest`), how many are equal to the bit between a miss alone, a hit alone and hits
in a batch, with `deterministic=False` and with `deterministic=True`, where all must be.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from octavo.models import LoadedModel, load_model
from octavo.serve import Completion, Engine, EngineConfig, SamplingParams

ROOT = Path(__file__).parents[1]
BATCH = 16
LONGER = 4  # answers where they are to take blocks from one another
SETTINGS: dict[str, tuple[Any, ...]] = {
    "cache": ("on", "off"),
    "company": ("alone", BATCH),
    "chunk": (512, 64),
    "pool": ("ample", "tight"),
    "cascade": ("on", "off"),
    "speculation": ("off", "on"),
}
BASELINE = {"cache": "off", "company": "alone", "chunk": 512, "pool": "ample"}
BASELINE |= {"cascade": "off", "speculation": "off"}


def real_prompts(loaded: LoadedModel, count: int, longest: int) -> list[list[int]]:
    """Pieces of this project's own code and what it says about itself, as token ids."""
    files = [*sorted(ROOT.glob("paged/*.py")), *sorted(ROOT.glob("serve/*.py"))]
    words = loaded.tokenizer.encode("\n".join(file.read_text() for file in files))
    rng = np.random.default_rng(0)
    lengths = np.rint(np.geomspace(1, longest, count)).astype(int)
    rng.shuffle(lengths)
    prompts = []
    for i, length in enumerate(lengths.tolist()):
        shared = length * 2 // 3 if i % 3 == 0 else 0
        begin = int(rng.integers(longest, len(words) - longest))
        prompts.append(words[:shared] + words[begin : begin + length - shared])
    return prompts


def cells(only: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Every combination that differs from the others in what it runs."""
    for values in itertools.product(*SETTINGS.values()):
        cell = dict(zip(SETTINGS, values, strict=True))
        if cell["company"] == "alone" and cell["cascade"] == "on":
            continue  # nobody to share a prefix with
        if all(str(cell[name]) == value for name, value in only.items()):
            yield cell


def tokens_of(cell: dict[str, Any], tokens: int) -> int:
    """How long the answers of a cell are."""
    return tokens * (LONGER if cell["pool"] == "tight" and cell["company"] == BATCH else 1)


def engine_for(
    loaded: LoadedModel, cell: dict[str, Any], max_model_len: int, cache_dtype: str
) -> Engine:
    """An engine with the settings of a cell."""
    most = -(-max_model_len // 16)
    # Tight: the longest and half as much again.
    num_blocks = 1 + (BATCH * most if cell["pool"] == "ample" else most * 3 // 2)
    return Engine(
        loaded,
        EngineConfig(
            num_blocks=num_blocks,
            kv_cache_dtype=cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=BATCH,
            max_num_batched_tokens=cell["chunk"],
            enable_prefix_caching=cell["cache"] == "on",
            enable_cascade_attention=cell["cascade"] == "on",
            num_speculative_tokens=4 if cell["speculation"] == "on" else 0,
        ),
    )


def answers(engine: Engine, company: str | int, prompts: Sequence[list[int]], tokens: int) -> list:
    """The answers to all prompts, in order."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    if company == "alone":
        return [engine.generate(prompt, params)[0] for prompt in prompts]
    return engine.generate(list(prompts), params)


def run_cell(
    loaded: LoadedModel,
    cell: dict[str, Any],
    prompts: Sequence[list[int]],
    args: argparse.Namespace,
    expected: Sequence[tuple[int, ...]] | None,
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """(what was seen, the tokens) of one setting; the baseline's answers are the longest."""
    most = args.tokens * LONGER
    engine = engine_for(loaded, cell, args.longest + most, args.kv_cache_dtype)
    begin = time.perf_counter()
    got = answers(
        engine, cell["company"], prompts, most if expected is None else tokens_of(cell, args.tokens)
    )
    seconds = time.perf_counter() - begin
    engine.check_invariants()
    stats = engine.stats()
    tokens = [answer.token_ids for answer in got]
    wanted = [b[: len(a)] for a, b in zip(tokens, expected or tokens, strict=True)]
    differ = [a != b for a, b in zip(tokens, wanted, strict=True)]
    pairs = zip(itertools.chain(*tokens), itertools.chain(*wanted), strict=True)
    row = cell | {
        "tokens": sum(map(len, tokens)),
        "differing_tokens": sum(a != b for a, b in pairs),
        "differing_prompts": sum(differ),
        "cached_tokens": sum(answer.num_cached_tokens for answer in got),
        "preemptions": stats.num_preemptions,
        "blocks_left_active": stats.num_active_blocks,
        "seconds": round(seconds, 1),
    }
    return row, tokens


def share_of_equal_bits(
    loaded: LoadedModel, prompts: Sequence[list[int]], args: argparse.Namespace, *, on: bool
) -> dict[str, float]:
    """The share of logprobs that equal those of a miss alone, with `deterministic` on or off."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=20)
    settings = {"max_model_len": args.longest + args.tokens, "max_num_seqs": BATCH}
    settings |= {"kv_cache_dtype": args.kv_cache_dtype}
    plain, engine = (
        Engine(loaded, EngineConfig(deterministic=on, enable_prefix_caching=cache, **settings))
        for cache in (False, True)
    )

    def logprobs(answers: Sequence[Completion]) -> np.ndarray:
        # By rank: the tokens themselves are compared elsewhere.
        values = [
            sorted((x.logprob for x in place.values()), reverse=True)[:20]
            for answer in answers
            for place in answer.logprobs or ()
        ]
        return np.array(values, np.float64)

    miss = logprobs([plain.generate(prompt, params)[0] for prompt in prompts])
    engine.generate(list(prompts), params)
    alone = logprobs([engine.generate(prompt, params)[0] for prompt in prompts])
    together = logprobs(engine.generate(list(prompts), params))
    return {
        "hit alone": float((alone == miss).mean()),
        "hit in a batch": float((together == miss).mean()),
    }


def code_digest() -> str:
    """Of all code that answers depend on."""
    packages = ("pallas_kernels", "paged", "models", "serve")
    files = [file for name in packages for file in sorted((ROOT / name).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def found_before(file: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run has left, if it was about the same."""
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text())
    return found if found["about"] == about else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", help="of the model; none by default")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of EngineConfig")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--only", default="", help="name=value pairs, separated by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    only = dict(pair.split("=", 1) for pair in args.only.split(",") if pair)
    if unknown := only.keys() - SETTINGS.keys():
        parser.error(f"no setting is called {unknown.pop()}; there are {', '.join(SETTINGS)}")
    if args.prompts < 2 or args.longest < 2:
        parser.error("at least 2 prompts, the longest of at least 2 tokens")

    loaded = load_model(args.model, quantization=args.quantization)
    prompts = real_prompts(loaded, args.prompts, args.longest)
    lengths = sorted(map(len, prompts))
    print(
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths)} in all;"
        f" {args.tokens} tokens each, {LONGER} times that where blocks are short",
        flush=True,
    )
    about = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    about |= {"python": platform.python_version(), "model": args.model, "code": code_digest()}
    about |= {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    about |= {"prompts": len(prompts), "prompt_tokens": sum(lengths), "tokens": args.tokens}
    known = found_before(args.json, about)
    expected = [tuple(tokens) for tokens in known.get("baseline", ())]
    if not expected:
        row, expected = run_cell(loaded, BASELINE, prompts, args, None)
        print(f"baseline: {row}\n", flush=True)
    columns = [*SETTINGS, "differing_tokens", "preemptions", "cached_tokens", "seconds"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)

    def write(rows: list[dict[str, Any]], equal: dict[bool, dict[str, float]]) -> None:
        if args.json:
            found = {"about": about, "cells": rows, "equal_bits": equal, "baseline": expected}
            args.json.write_text(json.dumps(found, indent=1) + "\n")

    rows = list(known.get("cells", ()))
    done = [{name: row[name] for name in SETTINGS} for row in rows]
    for row in rows:
        print("| " + " | ".join(str(row.get(column)) for column in columns) + " |", flush=True)
    for cell in cells(only):
        if cell in done:
            continue
        row, _ = run_cell(loaded, cell, prompts, args, expected)
        jax.clear_caches()  # programs of all cells take more memory mappings than Linux allows
        gc.collect()
        rows.append(row)
        write(rows, {})  # hours may follow
        print("| " + " | ".join(str(row[column]) for column in columns) + " |", flush=True)
    differing = sum(row["differing_tokens"] for row in rows)
    leaked = sum(row["blocks_left_active"] for row in rows)
    print(f"\n{len(rows)} settings: {differing} tokens differ, {leaked} blocks leaked")
    short = [prompt for prompt in prompts if len(prompt) <= args.longest // 4]
    equal = {on: share_of_equal_bits(loaded, short, args, on=on) for on in (False, True)}
    for on, shares in equal.items():
        line = ", ".join(f"{what} {share:.2%}" for what, share in shares.items())
        print(f"logprobs equal to a miss's to the bit, deterministic={on}: {line}")
    write(rows, equal)
    return int(differing or leaked or min(equal[True].values()) < 1)


if __name__ == "__main__":
    sys.exit(main())
