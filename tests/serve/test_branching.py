"""Parallel samples: one prompt, computed and held once, and the texts each seed gives alone."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, InvalidRequest, SamplingParams

from .tiny import tiny_engine, tiny_model

BLOCK = 8
LENGTHS = {"under-a-block": 5, "whole-blocks": 40, "with-a-tail": 83}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def sampled(n: int, *, max_tokens: int = 12, seed: int | None = 7) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    engine.check_invariants()


@pytest.fixture(scope="module")
def engines(tiny: LoadedModel) -> dict[str, Engine]:
    """One with a prefix cache and one without, for all tests: compiling takes longer than these."""
    return {
        "cached": tiny_engine(tiny),
        "plain": tiny_engine(tiny, enable_prefix_caching=False),
    }


@pytest.fixture(scope="module")
def small_engine(tiny: LoadedModel) -> Engine:
    """Few seats, short loops: much can happen in between."""
    return tiny_engine(tiny, max_decode_steps=2, max_num_seqs=4)


@pytest.fixture(scope="module")
def alone(engines: dict[str, Engine]):
    """What each seed gives when nothing is shared with anybody."""
    plain = engines["plain"]
    known: dict[tuple, tuple[int, ...]] = {}

    def run(tokens: list[int], n: int, *, max_tokens: int = 12) -> list[tuple[int, ...]]:
        texts = []
        for i in range(n):
            key = (*tokens, max_tokens, i)
            if key not in known:
                own = sampled(1, max_tokens=max_tokens, seed=7 + i)
                known[key] = plain.generate(tokens, own)[0].token_ids
            texts.append(known[key])
        return texts

    return run


@pytest.mark.slow
def test_sixteen_samples_hold_a_thousand_token_prompt_once(smollm2: LoadedModel) -> None:
    loaded = tiny_model(smollm2, max_context_len=1200)
    engine = tiny_engine(loaded, num_blocks=300, max_num_seqs=16, max_decode_steps=1)
    ids = engine.add_branches(prompt(1, 1004), sampled(16, max_tokens=20))
    while engine.stats().num_running < 16:
        engine.step()
    assert engine.stats().num_active_blocks == 126
    for written in range(1, 20):
        advanced = engine.step()
        assert len(advanced) == 16
        # 125 full blocks once; what follows them, the prompt's last four tokens first, is own.
        own = -(-(4 + written) // BLOCK)
        assert engine.stats().num_active_blocks == (0 if written == 19 else 125 + 16 * own)
        engine.check_invariants()
    assert {output.request_id for output in advanced} == set(ids)
    stats = engine.stats()
    assert (stats.prefilled_tokens, stats.prompt_tokens) == (1004, 1004)
    assert stats.num_preemptions == 0
    assert_empty(engine)


@pytest.mark.parametrize("cache", ["cached", "plain"])
@pytest.mark.parametrize("length", LENGTHS)
def test_each_sample_is_what_its_seed_gives_alone(engines, alone, length: str, cache: str) -> None:
    engine, tokens = engines[cache], prompt(20 + LENGTHS[length], LENGTHS[length])
    before = engine.stats().prefilled_tokens
    answers = engine.generate(tokens, sampled(4))
    assert [a.token_ids for a in answers] == alone(tokens, 4)
    assert len({a.token_ids for a in answers}) == 4
    assert [a.num_cached_tokens for a in answers] == [0] * 4
    assert engine.stats().prefilled_tokens - before == LENGTHS[length]
    assert_empty(engine)


def test_prompts_answered_together_come_in_order(engines, alone) -> None:
    engine = engines["cached"]
    first, second = prompt(3, 30), prompt(4, 70)
    answers = engine.generate([first, second, first], [sampled(3), sampled(4), sampled(2)])
    want = alone(first, 3) + alone(second, 4) + alone(first, 2)
    assert [a.token_ids for a in answers] == want
    assert_empty(engine)


@pytest.mark.parametrize("cache", ["cached", "plain"])
def test_more_samples_than_seats_wait_for_one(engines, alone, cache: str) -> None:
    engine, tokens = engines[cache], prompt(5, 45)
    before = engine.stats().prefilled_tokens
    answers = engine.generate(tokens, sampled(20))
    assert [a.token_ids for a in answers] == alone(tokens, 20)
    if cache == "cached":
        # Those that came late found all but the token whose logits they needed.
        assert {a.num_cached_tokens for a in answers} == {0, 44}
        assert engine.stats().prefilled_tokens - before <= 45 + 12
    assert_empty(engine)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["cached", "plain"])
def test_a_pool_too_small_for_all_samples_changes_no_token(
    tiny: LoadedModel, alone, cache: str
) -> None:
    engine = tiny_engine(tiny, num_blocks=25, enable_prefix_caching=cache == "cached")
    tokens = prompt(6, 83)
    answers = engine.generate(tokens, sampled(7, max_tokens=40))
    assert [a.token_ids for a in answers] == alone(tokens, 7, max_tokens=40)
    assert engine.stats().num_preemptions > 0
    assert_empty(engine)


def test_samples_of_one_token_end_with_the_prompt(engines, alone) -> None:
    engine, tokens = engines["cached"], prompt(7, 50)
    answers = engine.generate(tokens, sampled(6, max_tokens=1))
    assert [a.token_ids for a in answers] == alone(tokens, 6, max_tokens=1)
    assert_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("gone", [(0,), (1, 3), (0, 1, 2, 3, 4)])
def test_cancelled_samples_leave_the_others_as_they_were(
    small_engine: Engine, alone, steps: int, gone: tuple[int, ...]
) -> None:
    engine, tokens = small_engine, prompt(8, 83)  # two steps of prefill
    ids = engine.add_branches(tokens, sampled(5), cache_salt=f"{steps} {gone}")
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}

    def step() -> None:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids

    for _ in range(steps):
        step()
    for i in gone:
        assert engine.cancel(ids[i])
    engine.check_invariants()
    while engine.num_unfinished:
        step()
    want = alone(tokens, 5)
    for i in set(range(5)) - set(gone):
        assert tuple(outputs[ids[i]]) == want[i]
    assert_empty(engine)


def test_an_interrupt_while_samples_join_leaks_and_publishes_nothing(
    engines, alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["cached"]

    def interrupted(work):
        raise KeyboardInterrupt

    tokens = prompt(9, 30)
    before = engine.stats().num_cached_blocks
    monkeypatch.setattr(engine._runner, "packed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(tokens, sampled(4))
    monkeypatch.undo()
    assert_empty(engine)
    assert engine.stats().num_cached_blocks == before
    assert [a.token_ids for a in engine.generate(tokens, sampled(4))] == alone(tokens, 4)


def test_samples_without_a_seed_differ(engines) -> None:
    answers = engines["cached"].generate(prompt(10, 20), sampled(4, seed=None))
    assert len({a.token_ids for a in answers}) == 4


def test_samples_that_cannot_be_served_start_none(engines) -> None:
    engine = engines["cached"]
    with pytest.raises(InvalidRequest, match="n=2 answers") as caught:
        engine.add_request([1], sampled(2))
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequest, match="seed"):
        engine.add_branches([1], sampled(2, seed=(1 << 63) - 1))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_branches([1], sampled(2), request_ids=["a", "a"])
    for n in (0, 1025, 1.0, True):
        with pytest.raises(InvalidRequest, match="n="):
            SamplingParams(n=n)  # pyright: ignore[reportArgumentType]
    assert_empty(engine)


def test_samples_share_what_is_known_of_their_prompt(engines) -> None:
    params = SamplingParams(n=3, prompt_logprobs=0, max_tokens=2, ignore_eos=True)
    before = engines["cached"].stats().prefilled_tokens
    answers = engines["cached"].generate(prompt(11, 20), params)
    assert engines["cached"].stats().prefilled_tokens - before == 20
    first = answers[0].prompt_logprobs
    assert first is not None and len(first) == 20 and None not in first[1:]
    assert all(answer.prompt_logprobs == first for answer in answers)
