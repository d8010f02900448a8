"""Requests that wait for blocks from tiers below: others go on, and nothing ever leaks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from octavo.serve import Engine, SamplingParams

from .tiered import (
    GREEDY,
    SIZE,
    evict,
    from_tiers,
    let_threads_read,
    one,
    prompt,
    stack_of,
)


@pytest.fixture
def engine(tiered_engine: Engine) -> Engine:
    return tiered_engine


class Gate:
    """Lets the reads of tiers wait until they may go on."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch):
        self.open, self.asked = threading.Event(), threading.Event()
        let_threads_read(engine, patch)
        stack = stack_of(engine)
        load = stack.load

        def wait_and_load(*args):
            self.asked.set()
            assert self.open.wait(60)
            return load(*args)

        patch.setattr(stack, "load", wait_and_load)


def start_restoring(engine: Engine, patch: pytest.MonkeyPatch) -> tuple[Gate, str]:
    """An engine in which one request waits for its tier and another one decodes."""
    one(engine, prompt(0))
    evict(engine)
    gate = Gate(engine, patch)
    engine.add_request(prompt(3, 20), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.step()
    restoring = engine.add_request(prompt(0), GREEDY)
    for _ in range(3):
        outputs = engine.step()
        assert [len(output.token_ids) > 0 for output in outputs] == [True]  # the other one decodes
    assert gate.asked.is_set()
    return gate, restoring


def test_others_decode_while_blocks_are_read_and_followers_share_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cold
) -> None:
    gate, restoring = start_restoring(engine, monkeypatch)
    follower = engine.add_request(prompt(0), GREEDY)
    engine.step()
    assert engine.stats().num_waiting == 1  # for the blocks that are being read
    before = from_tiers(engine)["host"]
    gate.open.set()
    first, second = engine.collect([restoring, follower])
    engine.drain()
    engine.resume()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (96, 99)
    assert first.token_ids == second.token_ids == cold(prompt(0)).token_ids
    assert from_tiers(engine)["host"] - before == 12


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, restoring = start_restoring(engine, monkeypatch)
    assert engine.cancel(restoring)
    assert engine._restores._num_loads == 0
    gate.open.set()
    engine.drain()
    engine.resume()
    assert one(engine, prompt(0)).num_cached_tokens == 96


def test_a_request_that_is_preempted_while_it_waits_comes_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cold
) -> None:
    gate, restoring = start_restoring(engine, monkeypatch)
    (request,) = [r for r in engine._scheduler.running if r.request_id == restoring]
    before = engine.stats()
    engine._preempt(request)
    assert request.restore is None and engine._restores._num_loads == 0
    gate.open.set()
    answer = engine.collect([restoring])[0]
    engine.drain()
    engine.resume()
    assert answer.token_ids == cold(prompt(0)).token_ids
    after = engine.stats()
    assert after.external_hit_tokens == before.external_hit_tokens  # counted once, or never
    assert after.prefilled_tokens - before.prefilled_tokens < SIZE


def test_an_interrupt_between_two_batches_leaves_no_gap(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cold
) -> None:
    one(engine, prompt(0))
    evict(engine)
    put, calls = engine._runner.put_blocks, []

    def interrupted(*args) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return put(*args)

    monkeypatch.setattr(engine._runner, "put_blocks", interrupted)
    request_id = engine.add_request(prompt(0), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    (answer,) = engine.collect([request_id])
    assert answer.token_ids == cold(prompt(0)).token_ids
    assert answer.num_cached_tokens == 64 and len(calls) == 2


def test_a_reader_that_fails_costs_time_and_a_line(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cold, caplog: pytest.LogCaptureFixture
) -> None:
    one(engine, prompt(0))
    evict(engine)

    def fail(*args):
        raise MemoryError("none left")

    let_threads_read(engine, monkeypatch)
    monkeypatch.setattr(stack_of(engine), "load", fail)
    with caplog.at_level(logging.ERROR):
        answer = one(engine, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (0, cold(prompt(0)).token_ids)
    assert ["could not be read" in line for line in caplog.messages] == [True]


def test_damaged_files_are_computed_again_and_no_request_notices(
    engine: Engine, cold, caplog: pytest.LogCaptureFixture
) -> None:
    one(engine, prompt(0))
    evict(engine)
    stack_of(engine).clear(["host"])
    before = engine.stats().tiers["disk"]
    folder = Path(engine.config.disk_cache_dir)
    runner_tiers = engine._runner.tiers
    assert runner_tiers is not None
    key = engine._intake.namespace_key("", None)
    sixth = runner_tiers.keys(key, np.asarray(prompt(0), np.int32))[5]
    path = folder / f"{sixth.hex()}.kv"
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    answer = one(engine, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (40, cold(prompt(0)).token_ids)
    after = engine.stats().tiers["disk"]
    assert (after.errors - before.errors, after.misses - before.misses) == (1, 1)
    assert [sixth.hex() in line for line in caplog.messages] == [True]
    evict(engine)
    assert one(engine, prompt(0)).num_cached_tokens == 96  # written again


def test_a_long_random_story_gets_the_cold_answers(engine: Engine, cold) -> None:
    rng = np.random.default_rng(0)
    stems = [prompt(seed, 120) for seed in range(4)]
    prompts, answers = [], {}
    for i in range(40):
        stem = stems[int(rng.integers(4))]
        prompts.append(
            [*stem[: int(rng.integers(1, 120))], *prompt(100 + i, int(rng.integers(1, 20)))]
        )
    queue, ids = list(enumerate(prompts)), {}
    while queue or engine.num_unfinished:
        for _ in range(int(rng.integers(0, 3))):
            if queue:
                i, tokens = queue.pop()
                ids[engine.add_request(tokens, GREEDY)] = i
        if rng.random() < 0.05 and engine._scheduler.running:
            engine._preempt(engine._scheduler.victim())
        for output in engine.step():
            answers.setdefault(ids[output.request_id], []).extend(output.token_ids)
        if rng.random() < 0.2:
            engine.check_invariants()
    assert engine.stats().external_hit_tokens > 0
    for i, tokens in enumerate(prompts):
        assert tuple(answers[i]) == cold(tokens).token_ids
