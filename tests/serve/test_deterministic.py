"""With `deterministic=True` no bit of a logit depends on what was cached or what runs beside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Completion, Engine, EngineConfig, SamplingParams, determinism

from .tiny import tiny_engine, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)


def deterministic(tiny: LoadedModel, **settings) -> Engine:
    return tiny_engine(tiny, deterministic=True, decode_slice_ms=1e6, **settings)


def bits(answers: list[Completion]) -> list[tuple]:
    """Tokens, and every reported logprob as it is."""
    return [
        (a.token_ids, [{token: x.logprob for token, x in top.items()} for top in a.logprobs or ()])
        for a in answers
    ]


# XLA sums many wide rows by other programs than few narrow ones.
@pytest.mark.parametrize(
    ("hidden_size", "settings"),
    [
        (48, {}),
        pytest.param(48, {"kv_cache_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param(576, {}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_equal_to_the_bit_however_they_come_about(
    smollm2: LoadedModel, hidden_size: int, settings: dict[str, str]
) -> None:
    tiny = tiny_model(smollm2, hidden_size=hidden_size)
    rng = np.random.default_rng(2)
    # Long enough to be read once for all that share it.
    shared = rng.integers(1000, 40000, 300).tolist()
    prompts = [
        [*(shared if i % 2 else []), *rng.integers(1000, 40000, 3 + 11 * i).tolist()]
        for i in range(6)
    ]
    alone = deterministic(tiny, enable_prefix_caching=False, **settings)
    miss = bits([alone.generate(prompt, PARAMS)[0] for prompt in prompts])
    assert all(len(top) == 6 and len(top[0]) == 20 for _, top in miss)
    engine = deterministic(tiny, num_speculative_tokens=3, **settings)
    assert bits(engine.generate(prompts, PARAMS)) == miss  # together, sharing
    again = engine.generate(prompts, PARAMS)
    assert bits(again) == miss  # hits
    assert all(a.num_cached_tokens >= a.num_prompt_tokens - 1 for a in again)
    # Chunks, and room for two of the long ones, which grow until one gives way.
    small = deterministic(tiny, max_num_batched_tokens=16, num_blocks=54, **settings)
    assert bits(small.generate(prompts, PARAMS)) == miss
    long = replace(PARAMS, max_tokens=50)
    assert bits(small.generate(prompts, long)) == bits(alone.generate(prompts, long))
    assert small.stats().num_preemptions > 0
    small.check_invariants()


def test_where_it_costs_nothing_it_is_on_unasked(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(loaded: LoadedModel = smollm2, **settings) -> bool | None:
        return determinism.with_determinism(EngineConfig(**settings), loaded).deterministic

    assert chosen() is True
    assert chosen(deterministic=False) is False
    assert chosen(kv_cache_dtype="bfloat16") is True
    assert tiny_engine(tiny_model(smollm2, hidden_size=48)).config.deterministic is True
    monkeypatch.setattr(determinism, "cpu_kernels", lambda: None)
    assert chosen() is False  # XLA multiplies in small pieces for it
    assert chosen(replace(smollm2, quantization="w8a8")) is True
    monkeypatch.setattr(determinism.jax, "default_backend", lambda: "gpu")
    assert chosen(replace(smollm2, quantization="w8a8")) is False
    with pytest.raises(ValueError, match="deterministic=True needs the CPU backend, not gpu"):
        chosen(deterministic=True)
