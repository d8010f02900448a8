"""Beam search: what is found does not depend on sharing, company or room; nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import (
    BeamSearchParams,
    Completion,
    Engine,
    InvalidRequest,
    Logprob,
    SamplingParams,
)
from octavo.serve.beam_search import Beam, BeamSelection
from octavo.serve.branching import best

from .tiny import tiny_engine

WIDE = BeamSearchParams(beam_width=4, max_tokens=20, num_return_sequences=4, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    # Room for one of the searches below, or three or four of the requests.
    return tiny_engine(tiny, num_blocks=33)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert len(engine._runner.spare_rows._free) == engine.config.max_num_seqs
    engine.check_invariants()


@pytest.fixture(scope="module")
def recomputed(plain: Engine):
    """The search in which every beam is computed from scratch in every step."""
    known: dict[tuple, list[Beam]] = {}
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)

    def run(tokens: list[int], params: BeamSearchParams) -> list[Beam]:
        key = (tuple(tokens), params)
        if key not in known:
            selection = BeamSelection(params, params.stop_token_ids)
            while not selection.done:
                texts = [[*tokens, *beam.tokens] for beam in selection.running]
                answers = plain.generate(texts, one)
                tops = [entry for answer in answers for entry in answer.logprobs or ()]
                selection.advance([[(t, e.logprob) for t, e in top.items()] for top in tops])
            known[key] = selection.finished
        return known[key]

    return run


def assert_found(answers, wanted: list[Beam]) -> None:
    assert [a.token_ids for a in answers] == [beam.tokens for beam in wanted[: len(answers)]]
    for answer, beam in zip(answers, wanted, strict=False):
        assert answer.score == pytest.approx(beam.score, abs=1e-4)


@pytest.mark.parametrize("length", [1, 5, 40, 83])
def test_forked_beams_find_what_recomputed_ones_find(
    engine: Engine, plain: Engine, recomputed, length: int
) -> None:
    tokens = prompt(length, length)
    wanted = recomputed(tokens, WIDE)
    for one in (engine, plain):
        answers = one.beam_search(tokens, WIDE)
        assert_found(answers, wanted)
        assert len({a.token_ids for a in answers}) == 4
        assert_empty(one)


def test_answers_end_at_stop_tokens_and_compete(engine: Engine, recomputed) -> None:
    tokens = prompt(2, 30)
    likely = tuple(token for beam in recomputed(tokens, WIDE) for token in beam.tokens[2:6])
    for early in (True, False, "never"):
        params = BeamSearchParams(
            beam_width=4,
            max_tokens=20,
            num_return_sequences=3,
            stop_token_ids=tuple(set(likely))[:8],
            ignore_eos=True,
            early_stopping=early,
            length_penalty=0.5,
        )
        answers = engine.beam_search(tokens, params)
        assert_found(answers, recomputed(tokens, params))
        for answer in answers:
            ended = answer.token_ids[-1] in params.stop_token_ids
            assert answer.finish_reason == ("stop" if ended else "length")
    assert any(a.finish_reason == "stop" for a in answers)
    assert_empty(engine)


def test_beams_take_one_dispatch_a_step_and_hold_the_prompt_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, active = [], []
    decode_once = engine._runner.decode_once

    def counted(beams):
        calls.append(len(beams))
        active.append(engine.stats().num_active_blocks)
        return decode_once(beams)

    monkeypatch.setattr(engine._runner, "decode_once", counted)
    engine.beam_search(prompt(3, 44), WIDE)
    assert calls == [1] + [4] * 19
    # Five full blocks once; of what follows each beam has at most its own, and dead ones nothing.
    for written, blocks in enumerate(active):
        assert 5 + 1 <= blocks <= 5 + 4 * -(-(4 + written) // 8)
    assert_empty(engine)


def test_searches_and_requests_make_room_for_one_another(
    engine: Engine, plain: Engine, recomputed
) -> None:
    before = engine.stats().num_preemptions
    ids: dict[str, Any] = {}
    for i in range(3):
        ids |= dict.fromkeys([engine.add_request(prompt(10 + i, 60), GREEDY)], prompt(10 + i, 60))
        searched = prompt(20 + i, 50)
        group = engine.add_branches(searched, WIDE)
        ids |= {request_id: (searched, rank) for rank, request_id in enumerate(group)}
        ids |= dict.fromkeys([engine.add_request(prompt(30 + i, 70), GREEDY)], prompt(30 + i, 70))
    answers: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.num_unfinished:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_invariants()
    assert engine.stats().num_preemptions > before
    for request_id, what in ids.items():
        if isinstance(what, tuple):
            assert tuple(answers[request_id]) == recomputed(what[0], WIDE)[what[1]].tokens
        else:
            assert tuple(answers[request_id]) == plain.generate(what, GREEDY)[0].token_ids
    assert_empty(engine)


@pytest.mark.parametrize("cache", ["cached", "plain"])
def test_a_search_that_gave_way_finds_the_same(
    engine: Engine, plain: Engine, recomputed, cache: str
) -> None:
    one = {"cached": engine, "plain": plain}[cache]
    tokens = prompt(4, 30)
    ids = one.add_branches(tokens, WIDE)
    answers = {}
    for step in range(1000):
        answers |= {output.request_id: output for output in one.step()}
        if step in (0, 3, 9):
            assert one._beams.give_way(0)
            one.check_invariants()
        if not one.num_unfinished:
            break
    assert_found([answers[request_id] for request_id in ids], recomputed(tokens, WIDE))
    assert_empty(one)


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_a_cancelled_search_leaves_nothing(engine: Engine, recomputed, steps: int) -> None:
    tokens = prompt(5, 83)
    ids = engine.add_branches(tokens, WIDE)
    for _ in range(steps):
        engine.step()
    assert all(engine.cancel(request_id) for request_id in ids)
    assert not engine.cancel(ids[0])
    assert_empty(engine)
    # With one answer left the others are not missed.
    ids = engine.add_branches(tokens, WIDE)
    assert engine.cancel(ids[0]) and engine.cancel(ids[2])
    answers = engine.collect([ids[1], ids[3]])
    wanted = recomputed(tokens, WIDE)
    assert [a.token_ids for a in answers] == [wanted[1].tokens, wanted[3].tokens]
    assert_empty(engine)


@pytest.mark.parametrize("method", ["decode_once", "fork", "admit", "reserve"])
def test_an_interrupted_search_starts_again(
    engine: Engine, recomputed, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    tokens = prompt(6, 20)
    ids = engine.add_branches(tokens, WIDE)
    if method != "admit":
        for _ in range(3):
            engine.step()
    run = getattr(engine._runner, method)

    def interrupted(*args):
        run(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._runner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            engine.step()
    monkeypatch.undo()
    engine.check_invariants()
    assert_found(engine.collect(ids), recomputed(tokens, WIDE))
    assert_empty(engine)


BAD = [
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": True}, "beam_width"),
    ({"beam_width": 9}, "beam_width"),
    ({"beam_width": 8, "stop_token_ids": tuple(range(13))}, "beam_width"),
    ({"beam_width": 8, "max_tokens": 60}, "beam_width"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2000}, "max_tokens"),
    ({"length_penalty": float("nan")}, "length_penalty"),
    ({"length_penalty": "1"}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"num_return_sequences": 5}, "num_return_sequences"),
    ({"stop_token_ids": (1 << 20,)}, "stop_token_ids"),
]


@pytest.mark.parametrize(("given", "param"), BAD)
def test_a_search_that_cannot_be_is_refused(engine: Engine, given: dict, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        engine.beam_search(prompt(7, 30), BeamSearchParams(**given))
    assert caught.value.param == param
    assert_empty(engine)


def test_best_of_returns_the_likeliest_samples(plain: Engine) -> None:
    params = SamplingParams(n=6, seed=3, max_tokens=8, logprobs=0, ignore_eos=True)
    answers = plain.generate(prompt(8, 30), params)

    def mean(answer) -> float:
        own = [e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True)]
        return sum(own) / len(own)

    wanted = sorted(answers, key=mean, reverse=True)[:2]
    best_two = SamplingParams(n=2, best_of=6, seed=3, max_tokens=8, ignore_eos=True)
    found = plain.generate([prompt(8, 30), prompt(8, 30)], best_two)
    assert [a.token_ids for a in found] == [a.token_ids for a in wanted] * 2
    assert all(a.logprobs is None for a in found)
    with pytest.raises(InvalidRequest, match="best_of=1 "):
        SamplingParams(n=2, best_of=1)


def test_an_answer_without_tokens_is_the_least_likely() -> None:
    def answer(text: str, *logprobs: float) -> Completion:
        return Completion(
            text=text,
            token_ids=tuple(range(len(logprobs))),
            finish_reason="stop",
            num_prompt_tokens=1,
            num_cached_tokens=0,
            logprobs=tuple({i: Logprob(logprob=p, rank=1)} for i, p in enumerate(logprobs)),
        )

    answers = [answer("none"), answer("unlikely", -9.0), answer("likely", -0.5, -1.5)]
    kept = best(answers, SamplingParams(n=2, best_of=3))
    assert [one.text for one in kept] == ["likely", "unlikely"]


def test_searches_that_start_set_back_who_waits_and_do_not_pass_who_is_overdue(
    tiny: LoadedModel,
) -> None:
    engine = tiny_engine(tiny, max_num_seqs=2, max_setbacks=2)
    seated = [
        engine.add_request(prompt(60 + i, 9), replace(GREEDY, max_tokens=300)) for i in (0, 1)
    ]
    engine.step()
    waiting = engine.add_request(prompt(62, 9), GREEDY)
    short = replace(WIDE, beam_width=2, num_return_sequences=2, max_tokens=2)
    searches = [engine.add_branches(prompt(70 + i, 9), short) for i in range(3)]
    ends = []
    while engine.num_unfinished:
        ends += [o.request_id for o in engine.step() if o.finished]
    order = [ends.index(i) for i in (searches[0][0], searches[1][0], seated[0], searches[2][0])]
    assert order == sorted(order)
    assert ends.index(waiting) > ends.index(seated[0])
    assert_empty(engine)
