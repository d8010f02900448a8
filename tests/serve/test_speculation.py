"""Guessing from the text so far: what is guessed, and that it changes no token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import SamplingParams
from octavo.serve.speculation import may_propose, propose

from .tiny import tiny_engine


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the last of two places
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),  # the longer match before the last
        ([5, 6, 5, 6, 5, 6], [5, 6, 5]),  # what repeats goes on
        ([3, 3, 3], [3, 3, 3]),
        ([1, 2, 3, 4], None),
        ([1, 2, 9, 2], None),  # one token is no match
        ([1], None),
    ],
)
def test_what_followed_last_time_is_proposed(tokens: list[int], drafts: list[int] | None) -> None:
    history = np.full((2, 16), 77, np.int32)
    history[0, : len(tokens)] = tokens
    history[1, :3] = [77, 77, 77]
    num_tokens = jnp.array([len(tokens), 1])
    got, found = propose(jnp.asarray(history), num_tokens, 3)
    assert found.tolist() == [drafts is not None, False]
    assert may_propose(np.array(tokens)) == (drafts is not None)
    if drafts is not None:
        assert got[0].tolist() == drafts


def prompts_with_echoes() -> list[list[int]]:
    rng = np.random.default_rng(3)
    phrase = rng.integers(1000, 40000, 12).tolist()
    return [(phrase * 5)[: 40 + i] for i in range(3)] + [rng.integers(1000, 40000, 25).tolist()]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=25, ignore_eos=True, top_p=0.8),
    SamplingParams(temperature=0, max_tokens=23, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
]


def test_speculation_changes_no_token(tiny: LoadedModel) -> None:
    settings = {"max_num_seqs": 4, "decode_slice_ms": 1e6}
    plain = tiny_engine(tiny, **settings)
    guessing = tiny_engine(tiny, num_speculative_tokens=3, **settings)
    prompts = prompts_with_echoes()
    for some in (slice(0, 1), slice(1, 2), slice(0, 4)):
        expected = plain.generate(prompts[some], PARAMS[some])
        got = guessing.generate(prompts[some], PARAMS[some])
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
        assert [a.text for a in got] == [a.text for a in expected]
    stats = guessing.stats()
    # Two small layers repeat themselves soon, so that some guesses are right and some are not.
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    guessing.check_invariants()
    assert stats.num_active_blocks == 0
    assert plain.stats().num_draft_tokens == 0


@pytest.mark.slow
def test_a_right_guess_saves_a_step_and_a_stop_token_ends_within_one(tiny: LoadedModel) -> None:
    settings = {"max_num_seqs": 1, "max_decode_steps": 4, "decode_slice_ms": 1e6}
    prompt = [1234, 4321] * 20
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (expected,) = tiny_engine(tiny, **settings).generate(prompt, params)
    engine = tiny_engine(tiny, num_speculative_tokens=3, **settings)
    (answer,) = engine.generate(prompt, params)
    assert answer.token_ids == expected.token_ids
    last = expected.token_ids[-1]
    stop = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(last,), ignore_eos=True)
    (stopped,) = engine.generate(prompt, stop)
    end = expected.token_ids.index(last) + 1
    assert stopped.token_ids == expected.token_ids[:end] and stopped.finish_reason == "stop"
    engine.check_invariants()
    assert engine.stats().num_active_blocks == 0


@pytest.mark.slow
def test_with_too_many_sequences_nothing_is_guessed(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, num_speculative_tokens=3, max_speculative_seqs=1, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.generate(prompts_with_echoes()[:2], params)
    assert engine.stats().num_draft_tokens == 0
    engine.generate(prompts_with_echoes()[0], params)
    assert engine.stats().num_draft_tokens > 0


def test_bad_settings_are_named(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=-1 must be at least 0"):
        tiny_engine(tiny, num_speculative_tokens=-1)
