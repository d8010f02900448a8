"""Scheduling on a small model: policies, timeouts, and preemption that always gets somewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, InvalidRequest, SamplingParams, deadlines
from octavo.serve.decode_loops import schedules_ahead
from octavo.serve.outputs import RequestOutput
from octavo.serve.request import Request

from .tiny import tiny_engine

# As in test_engine.py: engines of one size share compiled programs. 24 blocks of 8 tokens.
SMALL_POOL = 25
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> Engine:
    """Answers one prompt at a time, with room for it and no cache."""
    return tiny_engine(tiny, enable_prefix_caching=False)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    engine.check_invariants()


def run(engine: Engine, outputs: Sequence[RequestOutput] = ()) -> dict[str, tuple[int, ...]]:
    """All tokens by request, after earlier outputs, in the order in which the requests ended."""
    tokens: dict[str, tuple[int, ...]] = {}
    ended = {}
    while outputs or engine.num_unfinished:
        new, outputs = [*outputs, *engine.step()], ()
        for output in new:
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
            if output.finished:
                ended[output.request_id] = tokens[output.request_id]
    return ended


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_a_pool_of_one_and_a_half_requests_does_not_thrash(
    tiny: LoadedModel, plain: Engine, policy: str
) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL, scheduling_policy=policy)
    # Up to 16 blocks each, of 24. Two prompts of three begin alike.
    prompts = [[*prompt(800 + i % 3, 20), *prompt(810 + i, 18)] for i in range(12)]
    ids = [
        engine.add_request(p, LONG, priority=i % 3 if policy == "priority" else 0)
        for i, p in enumerate(prompts)
    ]
    stuck = 0
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    while engine.num_unfinished:
        before = engine.stats()
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        after = engine.stats()
        progress = after.prefilled_tokens + after.generated_tokens
        stuck = 0 if progress > before.prefilled_tokens + before.generated_tokens else stuck + 1
        # A loop that finds no room, and ahead of time another one behind it.
        assert stuck <= 1 + schedules_ahead(engine.config), "steps in which nothing was computed"
    stats = engine.stats()
    assert 0 < stats.num_preemptions <= (engine.config.max_num_seqs - 1) * stats.num_finished
    # Far from the bound, in truth: each request is preempted about twice.
    assert stats.num_preemptions <= 3 * len(ids)
    for request_id, one in zip(ids, prompts, strict=True):
        assert tokens[request_id] == plain.generate(one, LONG)[0].token_ids
    assert_empty(engine)


@pytest.mark.slow
def test_priorities_are_served_in_order_and_push_out_lower_ones(
    tiny: LoadedModel, plain: Engine
) -> None:
    engine = tiny_engine(tiny, max_num_seqs=1, scheduling_policy="priority")
    prompts = {name: prompt(820 + i, 30) for i, name in enumerate(["low", "mid", "high", "last"])}
    engine.add_request(prompts["low"], GREEDY, request_id="low", priority=5)
    first = engine.step()
    for name, priority in (("last", 7), ("mid", 2), ("high", -3)):
        engine.add_request(prompts[name], GREEDY, request_id=name, priority=priority)
    ended = run(engine, first)
    assert list(ended) == ["high", "mid", "low", "last"]
    assert engine.stats().num_preemptions == 1
    for name, tokens in ended.items():
        assert tokens == plain.generate(prompts[name], GREEDY)[0].token_ids
    assert_empty(engine)


def test_whole_answers_have_a_priority_for_all_or_for_each(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(tiny, max_num_seqs=1, scheduling_policy="priority")
    prompts, order = [prompt(880 + i, 10) for i in range(3)], []
    start_fn = engine._scheduler.start

    def start(request: Request) -> None:
        order.append(request.priority)
        start_fn(request)

    monkeypatch.setattr(engine._scheduler, "start", start)
    engine.generate(prompts, GREEDY, priority=[2, 0, 1])
    engine.generate(prompts, GREEDY, priority=7)
    list(engine.stream(prompts[0], GREEDY, priority=3))
    assert order == [0, 1, 2, 7, 7, 7, 3]
    with pytest.raises(ValueError, match="2 priorities for 3 prompts"):
        engine.generate(prompts, GREEDY, priority=[1, 2])
    assert_empty(engine)


def test_a_low_priority_is_served_after_its_share_of_setbacks(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, max_num_seqs=1, scheduling_policy="priority", max_setbacks=3)
    one = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request(prompt(830, 10), one, request_id="first")
    engine.add_request(prompt(831, 10), one, request_id="poor", priority=9)
    order = []
    for i in range(8):
        engine.add_request(prompt(832 + i, 10), one, request_id=str(i))
        order += [output.request_id for output in engine.step()]
    assert order == ["first", "0", "1", "2", "poor", "3", "4", "5"]
    run(engine)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_priority_that_would_not_be_heeded_is_refused(tiny: LoadedModel, policy: str) -> None:
    engine = tiny_engine(tiny, scheduling_policy=policy)
    with pytest.raises(InvalidRequest, match="scheduling policy 'priority'") as caught:
        engine.add_request([1], GREEDY, priority=1)
    assert caught.value.param == "priority"
    for bad in (True, 1.5):
        with pytest.raises(InvalidRequest, match="must be an integer"):
            engine.add_request([1], GREEDY, priority=bad)  # pyright: ignore[reportArgumentType]
    assert engine.num_unfinished == 0


def test_the_longest_match_goes_first_and_costs_one_program(tiny: LoadedModel) -> None:
    engine = tiny_engine(tiny, max_num_seqs=1, scheduling_policy="lpm")
    known = prompt(840, 50)
    engine.generate(known, GREEDY)
    assert engine._runner.prefix_lens.program.num_sizes == 0  # nobody had to be compared
    engine.add_request(prompt(841, 50), GREEDY, request_id="new")
    engine.add_request([*known[:30], *prompt(842, 20)], GREEDY, request_id="some")
    engine.add_request([*known[:45], *prompt(843, 5)], GREEDY, request_id="most")
    engine.add_request(known, GREEDY, request_id="other tenant", cache_salt="x")
    assert list(run(engine)) == ["most", "some", "new", "other tenant"]
    assert engine._runner.prefix_lens.program.num_sizes == 1
    names = [name for name, _ in engine._runner.warmups()]
    assert names.count("match") == 1
    assert engine.warmup() == len(names) == engine.num_programs
    assert_empty(engine)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as deadlines see it."""
    now = [0.0]
    # Not `time.monotonic` itself: by that the event loops of other threads wake up.
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_request_ends_when_its_time_is_over_waiting_or_running(
    tiny: LoadedModel, plain: Engine, clock: list[float]
) -> None:
    engine = tiny_engine(tiny, max_num_seqs=1)
    timed = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, timeout_s=10)
    engine.add_request(prompt(860, 30), timed, request_id="runs")
    engine.add_request(prompt(861, 30), timed, request_id="waits")
    engine.add_request(prompt(862, 30), GREEDY, request_id="has time")
    outputs = [output for _ in range(3) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"runs"}
    clock[0] = 9.9
    outputs += engine.step()
    clock[0] = 10.0
    last = {output.request_id: output for output in engine.step()}
    assert last["runs"].finish_reason == last["waits"].finish_reason == "timeout"
    assert last["waits"].num_generated_tokens == 0
    tokens = sum((output.token_ids for output in outputs), ())
    assert len(tokens) == last["runs"].num_generated_tokens > 0
    assert tokens == plain.generate(prompt(860, 30), LONG)[0].token_ids[: len(tokens)]
    assert list(run(engine)) == ["has time"]
    stats = engine.stats()
    assert (stats.num_timed_out, stats.num_finished, stats.num_cancelled) == (2, 1, 0)
    # What was computed in time stays cached.
    assert engine.explain(prompt(860, 30)).num_cached_tokens == 29
    assert_empty(engine)


def test_whole_answers_end_in_time_too(tiny: LoadedModel, clock: list[float]) -> None:
    engine = tiny_engine(tiny)
    timed = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, timeout_s=1)
    stream = engine.stream(prompt(863, 20), timed)
    pieces = [next(stream)]
    clock[0] = 2
    pieces += stream
    assert pieces[-1].finish_reason == "timeout"
    answer = engine.generate(prompt(864, 20), timed)[0]  # its time starts when it comes
    assert answer.finish_reason == "length"
    assert_empty(engine)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_timeout_is_a_positive_number(seconds: object) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s") as caught:
        SamplingParams(timeout_s=seconds)  # pyright: ignore[reportArgumentType]
    assert caught.value.param == "timeout_s"


def test_without_room_to_the_end_a_request_of_the_pools_size_waits_for_the_others(
    tiny: LoadedModel, plain: Engine
) -> None:
    engine = tiny_engine(tiny, num_blocks=SMALL_POOL)
    large, params = prompt(870, 100), SamplingParams(temperature=0, max_tokens=93, ignore_eos=True)
    engine.add_request(prompt(871, 40), LONG, request_id="small")
    engine.step()
    engine.add_request(large, params, request_id="large")
    ended = run(engine)
    assert ended["large"] == plain.generate(large, params)[0].token_ids
    assert engine.stats().num_preemptions <= 1
    assert_empty(engine)
