"""Decode loops dispatched ahead: what they draw, drop and give back is as one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import BeamSearchParams, Engine, EngineConfig, SamplingParams, StructuredOutputs
from octavo.serve.decode_loops import schedules_ahead
from octavo.serve.outputs import RequestOutput

from .tiny import tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SMALL_POOL = 25
EVERY_KIND = [
    GREEDY,
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=7),
    replace(GREEDY, max_tokens=23, logprobs=3),
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5),
    replace(GREEDY, temperature=1.0, seed=5),
    replace(GREEDY, temperature=0.8, top_p=0.9, seed=6, frequency_penalty=0.7),
    replace(GREEDY, logit_bias={11: 4.0}, max_tokens=26),
]


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> Engine:
    """Answers without a cache and without loops ahead."""
    return tiny_engine(tiny, enable_prefix_caching=False, async_scheduling=False)


@pytest.fixture
def make_engine(tiny: LoadedModel) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        return tiny_engine(tiny, async_scheduling=True, **config)

    return make


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    engine.check_invariants()


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls by which loops are dispatched and read, as they come."""
    calls: list[str] = []
    for name in ("decode", "decode_behind", "fetch"):
        original = getattr(engine._runner, name)

        def noted(*args: Any, name: str = name, original: Callable = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(engine._runner, name, noted)
    return calls


def step_until(engine: Engine, number: int) -> list[RequestOutput]:
    """Steps until `number` tokens have been generated in all."""
    outputs = []
    while engine.stats().generated_tokens < number:
        outputs += engine.step()
    return outputs


def finish(engine: Engine, outputs: list[RequestOutput]) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.num_unfinished:
        outputs += engine.step()
    for output in outputs:
        tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    return tokens


def test_the_next_loop_is_dispatched_before_the_last_ones_tokens_are_read(
    make_engine: Callable[..., Engine], plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_decode_steps=4)
    calls = watch(engine, monkeypatch)
    prompts = [prompt(i) for i in range(3)]
    assert engine.generate(prompts, GREEDY) == plain.generate(prompts, GREEDY)
    # The first loop takes one step, as nobody knows how long that is, and the last has nothing
    # behind it: 29 tokens after the first one.
    count = calls.count("decode_behind")
    assert count >= 7 and calls[:3] == ["decode", "decode_behind", "fetch"]
    begun = landed = 0
    for call in calls:
        begun += call != "fetch"
        landed += call == "fetch"
        assert landed <= begun <= landed + 2
    assert calls.count("decode") <= 2  # the second when the loop's length is known
    assert_empty(engine)


def test_whatever_is_asked_for_comes_as_from_loops_one_after_the_other(
    make_engine: Callable[..., Engine], plain: Engine
) -> None:
    prompts = [prompt(10 + i % 5, 12 + i) for i in range(len(EVERY_KIND))]
    whole = plain.generate(prompts, EVERY_KIND)
    # Stop strings and stop tokens from what comes anyway, while others go on.
    text, tokens = whole[0].text, whole[0].token_ids
    ends = [
        replace(GREEDY, stop=(text[len(text) // 3 : len(text) // 3 + 4],)),
        replace(GREEDY, stop_token_ids=(tokens[9],)),
        replace(GREEDY, stop_token_ids=(tokens[9],), min_tokens=15),
    ]
    prompts += [prompts[0]] * len(ends)
    params = EVERY_KIND + ends
    expected = whole + plain.generate(prompts[-len(ends) :], ends)
    engine = make_engine(max_decode_steps=4, max_num_seqs=16, max_num_batched_tokens=32)
    for _ in range(2):  # computed, then found
        for answer, wanted in zip(engine.generate(prompts, params), expected, strict=True):
            assert answer.token_ids == wanted.token_ids
            assert (answer.text, answer.finish_reason) == (wanted.text, wanted.finish_reason)
            assert (answer.logprobs is None) == (wanted.logprobs is None)
            for own, other in zip(answer.logprobs or (), wanted.logprobs or (), strict=True):
                assert [*own] == [*other]
    assert [answer.finish_reason for answer in expected[-3:-1]] == ["stop", "stop"]
    assert_empty(engine)


def test_a_loop_without_blocks_does_nothing_and_room_is_made(
    make_engine: Callable[..., Engine], plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_blocks=SMALL_POOL, max_decode_steps=4)
    runs: list[int] = [0]  # of loops one after the other that did nothing
    fetch = engine._runner.fetch

    def counted(loop: Any) -> Any:
        drawn = fetch(loop)
        if (drawn.tokens >= 0).any():
            runs.append(0)
        else:
            runs[-1] += 1
        return drawn

    monkeypatch.setattr(engine._runner, "fetch", counted)
    long = replace(GREEDY, max_tokens=90)
    prompts = [prompt(30 + i, 38) for i in range(4)]
    answers = engine.generate(prompts, long)
    # At most the one that found no room and the one that was behind it already.
    assert 0 < max(runs) <= 2 and engine.stats().num_preemptions > 0
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == plain.generate(one, long)[0].token_ids
    assert_empty(engine)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_blocks_of_one_that_ends_with_a_loop_in_flight_serve_the_next(
    make_engine: Callable[..., Engine], plain: Engine, reason: str
) -> None:
    engine = make_engine(num_blocks=SMALL_POOL, max_decode_steps=4)
    long = replace(GREEDY, max_tokens=60)
    first, second, third = prompt(40, 40), prompt(41, 40), prompt(42, 150)
    if reason == "timeout":
        engine.add_request(first, replace(long, timeout_s=3600.0), request_id="a")
    else:
        engine.add_request(first, long, request_id="a")
    engine.add_request(second, long, request_id="b")
    outputs = step_until(engine, 20)
    assert engine._loops._first is not None
    if reason == "timeout":
        engine._deadlines.passed = lambda: [engine._requests["a"]]  # pyright: ignore
        outputs += engine.step()
        del engine._deadlines.passed
    else:
        engine.cancel("a")
    # It needs nearly all blocks, those of the first too.
    engine.add_request(third, replace(GREEDY, max_tokens=8), request_id="c")
    tokens = finish(engine, outputs)
    assert tokens["b"] == plain.generate(second, long)[0].token_ids
    assert tokens["c"] == plain.generate(third, replace(GREEDY, max_tokens=8))[0].token_ids
    again = engine.generate(first, long)[0]
    assert again.token_ids == plain.generate(first, long)[0].token_ids
    assert again.token_ids[: len(tokens["a"])] == tokens["a"]
    assert_empty(engine)


def test_an_interrupt_while_tokens_are_taken_loses_and_repeats_none(
    make_engine: Callable[..., Engine], plain: Engine
) -> None:
    engine = make_engine(max_decode_steps=4)
    penalised = replace(GREEDY, repetition_penalty=1.2)
    prompts = [prompt(50), prompt(51)]
    for name, one in zip("ab", prompts, strict=True):
        engine.add_request(one, penalised, request_id=name)
    outputs = step_until(engine, 12)
    take = engine._take_tokens
    interrupted = []

    def interrupting(request: Any, drawn: Any, row: int) -> int:
        if row == 1 and not interrupted:
            interrupted.append(request)
            raise KeyboardInterrupt
        return take(request, drawn, row)

    engine._take_tokens = interrupting
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine._loops.in_flight
    tokens = finish(engine, outputs)
    for name, one in zip("ab", prompts, strict=True):
        assert tokens[name] == plain.generate(one, penalised)[0].token_ids
    assert_empty(engine)


def test_arrivals_and_departures_at_random_leave_the_tokens_as_they_are(
    make_engine: Callable[..., Engine], plain: Engine
) -> None:
    rng = np.random.default_rng(7)
    engine = make_engine(num_blocks=50, max_decode_steps=4)
    common = prompt(60, 24)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs: list[RequestOutput] = []
    dropped = set()
    while len(asked) < 24 or engine.num_unfinished:
        if len(asked) < 24 and rng.random() < 0.5:
            own = prompt(100 + len(asked), int(rng.integers(1, 60)))
            one = common + own if rng.random() < 0.5 else own
            params = replace(GREEDY, max_tokens=int(rng.integers(1, 40)))
            if rng.random() < 0.3:
                params = replace(params, temperature=1.0, seed=len(asked))
            name = str(len(asked))
            engine.add_request(one, params, request_id=name)
            asked[name] = one, params
        elif rng.random() < 0.05 and engine._requests:
            name = str(rng.choice([*engine._requests]))
            engine.cancel(name)
            dropped.add(name)
        else:
            outputs += engine.step()
        if rng.random() < 0.1:
            engine.check_invariants()
    tokens = finish(engine, outputs)
    assert dropped and engine.stats().num_cancelled == len(dropped)
    for name, (one, params) in asked.items():
        expected = plain.generate(one, params)[0].token_ids
        seen = tokens.get(name, ())
        assert seen == (expected[: len(seen)] if name in dropped else expected)
    assert_empty(engine)


def test_grammars_guesses_and_beams_go_beside_loops_ahead(
    make_engine: Callable[..., Engine], plain: Engine
) -> None:
    engine = make_engine(max_decode_steps=4, num_speculative_tokens=3, max_speculative_seqs=1)
    form = StructuredOutputs(regex="[ab]{3}-[0-9]{4}")
    guided = replace(GREEDY, structured_outputs=form)
    prompts = [prompt(70), prompt(71), [5, 6, 7] * 8]
    params = [GREEDY, guided, GREEDY]
    expected = [plain.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
    assert [a.token_ids for a in engine.generate(prompts, params)] == expected
    assert engine.generate(prompts[2], GREEDY)[0].token_ids == expected[2]
    search = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    (name,) = engine.add_branches(prompts[0], GREEDY)
    outputs = step_until(engine, engine.stats().generated_tokens + 6)
    found = engine.beam_search(prompts[1], search)
    assert [a.token_ids for a in found] == [
        a.token_ids for a in plain.beam_search(prompts[1], search)
    ]
    # `collect` threw away what others gained meanwhile.
    finish(engine, outputs)
    assert engine.generate(prompts[0], GREEDY)[0].token_ids == expected[0]
    assert name not in engine._requests
    assert_empty(engine)


def test_an_engine_whose_last_loop_is_in_flight_counts_as_idle(
    make_engine: Callable[..., Engine], plain: Engine
) -> None:
    engine = make_engine(max_decode_steps=4)
    one = prompt(80)
    engine.add_request(one, GREEDY, request_id="a")
    step_until(engine, 8)
    assert engine._loops.in_flight
    engine.cancel("a")
    assert not engine._loops.in_flight
    snapshot = engine.cache_snapshot()
    engine.reset_cache()
    assert engine.generate(one, GREEDY)[0].num_cached_tokens == 0
    engine.restore_cache(snapshot)
    answer = engine.generate(one, GREEDY)[0]
    assert answer.num_cached_tokens > 0
    assert answer.token_ids == plain.generate(one, GREEDY)[0].token_ids
    assert_empty(engine)


def test_it_is_chosen_by_the_device_unless_said() -> None:
    assert not schedules_ahead(EngineConfig())  # tests run on CPUs
    assert schedules_ahead(EngineConfig(async_scheduling=True))
    assert not schedules_ahead(EngineConfig(async_scheduling=False))
