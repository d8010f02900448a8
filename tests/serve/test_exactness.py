"""Greedy answers do not depend on hits, chunks or company, and a shared prefix is computed once."""

from __future__ import annotations

import os
from dataclasses import asdict

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, EngineConfig, SamplingParams

from ..texts import TEXTS
from .conftest import CONFIG

# `make test-exactness` looks closer: 50 prompts, 16 tokens each, engines of the default size, three
# sizes of chunks, and all 32 answers of the burst.
NUM_PROMPTS = int(os.environ.get("OCTAVO_EXACT_PROMPTS", "8"))
NUM_TOKENS = int(os.environ.get("OCTAVO_EXACT_TOKENS", "4"))
CLOSELY = NUM_PROMPTS > 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def engine_for(smollm2: LoadedModel, **config) -> Engine:
    # Engines of one size share their programs; the small ones with the tests' server.
    config = config if CLOSELY else asdict(CONFIG) | config
    return Engine(smollm2, EngineConfig(**config))


def real_prompts(smollm2: LoadedModel, count: int) -> list[list[int]]:
    """Prompts of 1 to 72 tokens of real text, a third of them with a common beginning."""
    rng = np.random.default_rng(0)
    words = smollm2.tokenizer.encode(" ".join(TEXTS))
    system = words[:40]
    prompts = []
    for i in range(count):
        begin, length = int(rng.integers(0, len(words) - 60)), int(rng.integers(1, 33))
        prompts.append((system if i % 3 == 0 else []) + words[begin : begin + length])
    return prompts


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    return real_prompts(smollm2, NUM_PROMPTS)


@pytest.fixture(scope="module")
def baseline(smollm2: LoadedModel, prompts) -> list[tuple[int, ...]]:
    """Each prompt alone, without a cache."""
    engine = engine_for(smollm2, enable_prefix_caching=False)
    return [engine.generate(p, GREEDY)[0].token_ids for p in prompts]


@pytest.mark.parametrize("chunk", [32, 64, 512] if CLOSELY else [16, 32])
@pytest.mark.parametrize("cache", ["cached", "plain"])
def test_greedy_answers_do_not_depend_on_cache_chunk_or_company(
    smollm2: LoadedModel, prompts, baseline, cache: str, chunk: int
) -> None:
    engine = engine_for(
        smollm2, max_num_batched_tokens=chunk, enable_prefix_caching=cache == "cached"
    )
    # Together they share what is being computed, alone they find what was.
    together = engine.generate(prompts, GREEDY)
    assert [a.token_ids for a in together] == baseline
    alone = [engine.generate(p, GREEDY)[0] for p in prompts]
    assert [a.token_ids for a in alone] == baseline
    for answers, least in ((together, 32 * (NUM_PROMPTS // 3 - 1)), (alone, 8 * NUM_PROMPTS)):
        hits = sum(a.num_cached_tokens for a in answers)
        assert hits >= least if cache == "cached" else hits == 0
    engine.check_invariants()


@pytest.mark.slow
def test_thirty_two_requests_at_once_compute_their_prefix_once(smollm2: LoadedModel) -> None:
    words = smollm2.tokenizer.encode(" ".join(TEXTS))
    prefix = (words * (1 + 1024 // len(words)))[:1024]
    rng = np.random.default_rng(1)
    prompts = [[*prefix, *rng.integers(1000, 40000, 32).tolist()] for _ in range(32)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = engine_for(smollm2)
    answers = engine.generate(prompts, params)
    prefilled = engine.stats().prefilled_tokens
    assert prefilled <= 1024 + 32 * 48
    assert sum(a.num_cached_tokens for a in answers) == 31 * 1024
    plain = engine_for(smollm2, enable_prefix_caching=False)
    some = range(0, 32, max(1, 100 // NUM_PROMPTS - 1))
    assert [answers[i].token_ids for i in some] == [
        plain.generate(prompts[i], params)[0].token_ids for i in some
    ]
    assert engine.stats().num_active_blocks == 0
    engine.check_invariants()
