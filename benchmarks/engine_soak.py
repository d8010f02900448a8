"""A long run of the engine under everything that can happen to a request; nothing may break.

    python benchmarks/engine_soak.py [--requests 5000] [--seed 0] [--json FILE]

On a small model with random weights, in pools from one and a half requests to ample, under every
scheduling policy: requests with shared and own prefixes, greedy and seeded, with penalties, of
several tenants and adapters, of any priority, several samples of one prompt and beam searches;
some are cancelled, some run out of time, and adapters are loaded anew under the same name. Every so
often and at the end of each part, invariants; at the end of each part, no block held and the memory
as before; of every request, tokens as it gets alone without a cache (of one that was ended, the
first of them), and no more setbacks than the scheduler promises. It ends with exit status 1 if
anything was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from octavo.models import Llama, LlamaConfig, LoadedModel, LoraAdapter, load_model
from octavo.models.lora import lora_shapes
from octavo.serve import BeamSearchParams, Engine, EngineConfig, NoAdapterSlot, SamplingParams

MAX_LEN, SIZE, SEATS, SETBACKS = 256, 8, 8, 16
REQUEST = MAX_LEN // SIZE  # blocks of the longest
POOLS = {"1.5 requests": REQUEST * 3 // 2, "4 requests": 4 * REQUEST, "ample": 40 * REQUEST}
POLICIES = ("fcfs", "priority", "lpm")
ADAPTERS = ("one", "two")
NUM_KINDS = 240  # different requests; each is asked again and again


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A request that may be made."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    salt: str
    adapter: str | None
    version: int  # of the adapter


def small_model(loaded: LoadedModel, max_context_len: int = MAX_LEN) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=loaded.config.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_context_len=max_context_len,
        tie_embeddings=False,
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    for layer in model.layers:  # so that what comes next depends on what was before
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    return replace(loaded, name="small", model=model, config=config, fingerprint="small")


def adapter(config: LlamaConfig, name: str, version: int) -> LoraAdapter:
    rng = np.random.default_rng([ADAPTERS.index(name), version])

    def factor(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    layers = [
        {t: (factor(n, 4), factor(4, out)) for t, (n, out) in lora_shapes(config).items()}
        for _ in range(config.num_layers)
    ]
    return LoraAdapter(config=config, layers=layers)


def kinds(rng: random.Random) -> list[Kind]:
    """Requests that share beginnings, tenants and adapters with one another."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    stems = [tokens(rng.randint(20, 150)) for _ in range(12)]
    found = []
    for i in range(NUM_KINDS):
        stem = stems[i % len(stems)][: rng.randint(1, 150)] if rng.random() < 0.8 else []
        prompt = [*stem, *tokens(rng.randint(1, 40))]
        sampled = rng.random() < 0.4
        params: SamplingParams | BeamSearchParams = SamplingParams(
            temperature=0.8 if sampled else 0.0,
            seed=rng.randrange(1000) if sampled else None,
            top_p=rng.choice([1.0, 0.9]) if sampled else 1.0,
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            max_tokens=rng.randint(1, MAX_LEN - len(prompt)) if i % 7 == 0 else rng.randint(1, 40),
            n=3 if sampled and i % 4 == 0 else 1,
            ignore_eos=True,
        )
        if i % 12 == 5:
            del prompt[60:]
            params = BeamSearchParams(
                beam_width=3,
                num_return_sequences=2,
                max_tokens=rng.randint(1, 12),
                ignore_eos=True,
            )
        name = (None, *ADAPTERS)[i % 3]
        found.append(
            Kind(
                prompt=tuple(prompt),
                params=params,
                salt=rng.choice(["", "", "tenant"]),
                adapter=name,
                version=0 if name is None else rng.randrange(2),
            )
        )
    return found


def engine_for(loaded: LoadedModel, **settings) -> Engine:
    sizes: dict[str, Any] = {"block_size": SIZE, "max_num_seqs": SEATS}
    sizes |= {"max_num_batched_tokens": 64, "max_loras": 4, "max_lora_rank": 4}
    return Engine(loaded, EngineConfig(compilation_cache_dir="", **(sizes | settings)))


Answers = list[tuple[int, ...]]


def solo_tokens(loaded: LoadedModel, asked: list[Kind]) -> dict[Kind, Answers]:
    """What each gets alone, without a cache."""
    engine = engine_for(loaded, num_blocks=2 * REQUEST, enable_prefix_caching=False)
    found = {}
    for version in (0, 1):
        for name in ADAPTERS:
            engine.load_adapter(name, adapter(loaded.config, name, version))
        for kind in asked:
            if kind.version == version:
                ids = engine.add_branches(list(kind.prompt), kind.params, adapter=kind.adapter)
                found[kind] = [answer.token_ids for answer in engine.collect(ids)]
    return found


class Part:
    """One engine under one load; `faults` counts what must not happen, by name."""

    def __init__(self, loaded: LoadedModel, pool: int, policy: str, rng: random.Random):
        self._config, self._policy, self._rng = loaded.config, policy, rng
        self._engine = engine_for(
            loaded,
            num_blocks=1 + pool,
            scheduling_policy=policy,
            max_setbacks=SETBACKS,
            num_speculative_tokens=2,
        )
        self._versions: dict[str, int] = dict.fromkeys(ADAPTERS, 0)
        self._live: dict[str, tuple[Kind, int]] = {}  # and which of its answers
        self._tokens: dict[str, list[int]] = {}
        self.faults, self.seen = Counter(), Counter()
        self.most_setbacks = 0
        for name in self._versions:
            self._engine.load_adapter(name, adapter(self._config, name, 0))

    def _load_anew(self, name: str) -> None:
        """Other weights under the same name; who runs on the old ones goes on with them."""
        version = 1 - self._versions[name]
        try:
            self._engine.load_adapter(name, adapter(self._config, name, version))
        except NoAdapterSlot:
            self.seen["adapters that found no slot"] += 1
        else:
            self._versions[name] = version
            self.seen["adapters loaded anew"] += 1

    def _add(self, kind: Kind) -> int:
        """Ask for something; returns how many answers are to come."""
        params, priority = kind.params, 0
        if isinstance(params, SamplingParams):
            if self._policy == "priority":
                priority = self._rng.randrange(-2, 3)
            timeout = self._rng.choice([None] * 9 + [self._rng.uniform(0.001, 0.3)])
            params = replace(params, timeout_s=timeout)
        ids = self._engine.add_branches(
            list(kind.prompt),
            params,
            cache_salt=kind.salt,
            adapter=kind.adapter,
            priority=priority,
        )
        for i, request_id in enumerate(ids):
            self._live[request_id], self._tokens[request_id] = (kind, i), []
        self.seen["beam searches"] += isinstance(params, BeamSearchParams)
        self.seen["prompts with several samples"] += (
            isinstance(params, SamplingParams) and len(ids) > 1
        )
        return len(ids)

    def run(self, asked: list[Kind], solo: dict[Kind, Answers], count: int) -> None:
        """Make requests for `count` answers and see them through."""
        engine, rng = self._engine, self._rng
        while count > 0 or self._live:
            if rng.random() < 0.02:
                self._load_anew(rng.choice(ADAPTERS))
            mine = [k for k in asked if not k.adapter or k.version == self._versions[k.adapter]]
            while count > 0 and len(self._live) < 3 * SEATS and rng.random() < 0.7:
                count -= self._add(rng.choice(mine))
            if self._live and rng.random() < 0.03:
                request_id = rng.choice(list(self._live))
                engine.cancel(request_id)
                self._ended(request_id, "cancelled", solo)
            for request in engine._requests.values():
                self.most_setbacks = max(self.most_setbacks, request.num_setbacks)
            for output in engine.step():
                self._tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self._ended(output.request_id, output.finish_reason, solo)
            if rng.random() < 0.02:
                engine.check_invariants()
        engine.check_invariants()
        stats = engine.stats()
        self.seen["preemptions"] += stats.num_preemptions
        self.seen["guesses taken"] += stats.num_accepted_tokens
        self.seen["cached tokens"] += stats.prefix_hit_tokens
        self.faults["blocks held at the end"] += stats.num_active_blocks
        self.faults["requests left"] += engine.num_unfinished

    def _ended(self, request_id: str, reason: str, solo: dict[Kind, Answers]) -> None:
        (kind, i), tokens = self._live.pop(request_id), tuple(self._tokens.pop(request_id))
        expected = solo[kind][i]
        if reason in ("cancelled", "timeout"):
            expected = expected[: len(tokens)]
        self.seen[reason] += 1
        self.faults["answers with wrong tokens"] += tokens != expected


def resident_mib() -> float:
    """Memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    loaded = small_model(load_model("smollm2"))
    rng = random.Random(args.seed)
    asked = kinds(rng)
    solo = solo_tokens(loaded, asked)
    parts = [(pool, policy) for pool in POOLS for policy in POLICIES]
    faults, rows = Counter(), []
    for i, (pool, policy) in enumerate(parts):
        count = args.requests * (i + 1) // len(parts) - args.requests * i // len(parts)
        begin, arrays = time.perf_counter(), len(jax.live_arrays())
        part = Part(loaded, POOLS[pool], policy, rng)
        half, held = count // 2, []
        for some in (half, count - half):
            part.run(asked, solo, some)
            held.append(len(jax.live_arrays()) - arrays)
        part.faults["arrays gathered over time"] += max(0, held[1] - held[0])
        part.faults["setbacks above the bound"] += max(0, part.most_setbacks - SETBACKS)
        faults.update(part.faults)
        rows.append(
            {
                "pool": pool,
                "policy": policy,
                "requests": count,
                **part.seen,
                "most_setbacks": part.most_setbacks,
                "resident_mib": round(resident_mib()),
                "seconds": round(time.perf_counter() - begin, 1),
                "faults": sum(part.faults.values()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    print(f"{args.requests} requests; faults: {dict(+faults) or 'none'}")
    if args.json:
        about = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
        about |= {"python": platform.python_version(), "seed": args.seed}
        args.json.write_text(json.dumps({"about": about, "parts": rows}, indent=1) + "\n")
    return int(faults.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
