"""Decoding with shared prefixes read once gives the tokens of every sequence on its own."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import SamplingParams

from .tiny import tiny_engine


@pytest.mark.slow
def test_sequences_that_share_prefixes_decode_the_same_tokens(tiny: LoadedModel) -> None:
    rng = np.random.default_rng(0)
    # Longer than what the CPU kernel takes at once, 256 tokens: shorter ones are not shared.
    one, two = rng.integers(1000, 40000, (2, 300)).tolist()
    # Two groups and one that shares nothing; they end after 3 to 24 tokens.
    heads = [one, one, two, one, two, one, rng.integers(1000, 40000, 90).tolist()]
    prompts = [[*head, *rng.integers(1000, 40000, 5 + i).tolist()] for i, head in enumerate(heads)]
    params = [
        SamplingParams(temperature=0, max_tokens=3 * (1 + i), ignore_eos=True)
        for i in range(len(prompts))
    ]
    settings = {"max_decode_steps": 8, "decode_slice_ms": 1e6}
    cascade = tiny_engine(tiny, **settings)
    answers = cascade.generate(prompts, params)
    assert sum(a.num_cached_tokens for a in answers) >= 4 * 296
    plain = tiny_engine(tiny, enable_cascade_attention=False, **settings).generate(prompts, params)
    alone = tiny_engine(tiny, enable_prefix_caching=False, **settings)
    for answer, other, prompt, own in zip(answers, plain, prompts, params, strict=True):
        assert answer.token_ids == other.token_ids == alone.generate(prompt, own)[0].token_ids
    cascade.check_invariants()
