"""Restore or compute: each choice gives the same tokens, leaves nothing behind, and is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.paged.cost_model import HARDWARE, CostModel, fit_restore
from octavo.paged.tiers import DiskTier
from octavo.serve import BeamSearchParams, Completion, Engine, SamplingParams
from octavo.serve.metrics import ServerMetrics
from octavo.serve.model_shape import shape_of
from octavo.serve.outputs import RestoreStats
from octavo.serve.restore_choice import RestoreChoice, choice_for

from .tiered import BLOCK_GIB, GREEDY, SIZE, one, prompt, stack_of
from .tiny import tiny_engine

LONG = 100  # tokens of `prompt(0)`


@pytest.fixture(scope="module")
def shared(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = tiny_engine(
        tiny,
        num_blocks=24,
        max_model_len=160,
        max_decode_steps=4,
        host_cache_gib=200 * BLOCK_GIB,
        disk_cache_dir=str(tmp_path_factory.mktemp("blocks")),
        disk_cache_gib=0.1,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose tiers hold `prompt(0)` and whose device does not."""
    shared.reset_cache(disk=True)
    monkeypatch.setattr(shared._restores, "choice", RestoreChoice(None, SIZE))
    one(shared, prompt(0))
    evict(shared)
    yield shared
    stats = shared.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert shared._restores._num_loads == 0 and shared._restores._watched == []
    shared.check_invariants()


def evict(engine: Engine) -> None:
    """Leave nothing on the device; the tiers keep what they have."""
    stack_of(engine).flush()
    engine._runner.reset_cache(keep_pinned=False)


@pytest.fixture(scope="module")
def cold(tiny: LoadedModel) -> Completion:
    """What `prompt(0)` gets where nothing is ever shared."""
    alone = tiny_engine(tiny, num_blocks=100, max_model_len=160, enable_prefix_caching=False)
    return one(alone, prompt(0))


def decide(engine: Engine, *, link: float, flops: float = 1e9, disk: float = 1e15) -> RestoreChoice:
    """Let an engine decide by a machine of such rates."""
    hardware = replace(
        HARDWARE["h100"],
        peak_flops=flops,
        peak_link_bytes=link,
        peak_disk_read_bytes=disk,
        peak_memory_bytes=1e15,
    )
    shape = shape_of(engine.loaded.model.config, param_dtype_bytes=4, kv_dtype_bytes=4)
    choice = RestoreChoice(CostModel(shape, hardware, chunk_size=32), SIZE)
    engine._restores.choice = choice
    return choice


def split(engine: Engine) -> RestoreChoice:
    """Let an engine compute a part of the 12 blocks, and read the rest from disk meanwhile."""
    stack_of(engine).clear(["host"])
    choice = decide(engine, link=1e15)
    assert choice.costs is not None
    recompute = choice.costs.seconds_to_recompute(0, 12 * SIZE)
    rate = 12 * BLOCK_GIB * 2**30 / recompute  # as long as computing all of them
    return decide(engine, link=1e15, disk=rate / HARDWARE["h100"].efficiency.disk)


def test_what_is_restored_sooner_is_restored(engine: Engine, cold: Completion) -> None:
    choice, before = decide(engine, link=1e15), engine.stats()
    answer, after = one(engine, prompt(0)), engine.stats()
    assert (answer.num_cached_tokens, answer.token_ids) == (96, cold.token_ids)
    assert after.prefilled_tokens - before.prefilled_tokens == LONG - 96
    assert after.restores == choice.stats
    assert (choice.stats.num_restored, choice.stats.num_recomputed) == (1, 0)
    assert 0 < choice.stats.predicted_seconds < choice.stats.actual_seconds


def test_what_is_computed_sooner_is_computed(engine: Engine, cold: Completion) -> None:
    choice, before = decide(engine, link=1.0, flops=1e15), engine.stats()
    answer, after = one(engine, prompt(0)), engine.stats()
    assert (answer.num_cached_tokens, answer.token_ids) == (0, cold.token_ids)
    assert after.prefilled_tokens - before.prefilled_tokens == LONG
    assert after.tiers["host"].hits == before.tiers["host"].hits
    assert (choice.stats.num_restored, choice.stats.num_recomputed) == (0, 1)
    # Computing 96 tokens took longer than was predicted, and less than restoring would have.
    assert choice.stats.actual_seconds > choice.stats.predicted_seconds > 0
    assert choice.stats.regret_seconds == 0
    # It is on the device now, and nobody has to choose.
    assert one(engine, prompt(0)).num_cached_tokens == 99
    assert choice.stats.num_recomputed == 1


def test_a_choice_is_counted_once_however_the_request_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = decide(engine, link=1.0, flops=1e15)
    ended: list[object] = []
    note = choice.carried_out
    monkeypatch.setattr(choice, "carried_out", lambda w: (ended.append(w), note(w)))
    one(engine, prompt(0), SamplingParams(temperature=0, max_tokens=1))  # it ends with its prefill
    assert len(ended) == 1
    evict(engine)
    name = engine.add_request(prompt(0), GREEDY)
    engine.step()
    (request,) = engine._scheduler.running
    engine._preempt(request)  # with most of its prompt still to compute
    evicted = engine.collect([name])
    assert len(evicted) == 1 and len(ended) == 2


def test_a_choice_that_turns_out_wrong_is_regretted(engine: Engine) -> None:
    choice = decide(engine, link=1e15, flops=1e18)
    assert choice.costs is not None
    one(engine, prompt(0))
    stats = choice.stats
    assert stats.num_restored + stats.num_recomputed == 1
    assert stats.regret_seconds == pytest.approx(stats.actual_seconds, rel=0.05) and (
        stats.regret_seconds > 0
    )


def test_the_head_is_computed_while_the_tail_is_read(engine: Engine, cold: Completion) -> None:
    choice, before = split(engine), engine.stats()
    answer, after = one(engine, prompt(0)), engine.stats()
    computed = after.prefilled_tokens - before.prefilled_tokens
    assert choice.stats.num_split == 1
    assert LONG - 96 < computed < LONG
    assert answer.num_cached_tokens == LONG - computed
    assert after.external_hit_tokens - before.external_hit_tokens == LONG - computed
    assert after.tiers["disk"].hits - before.tiers["disk"].hits == (LONG - computed) // SIZE
    assert answer.token_ids == cold.token_ids
    assert choice.stats.actual_seconds > 0
    # All of it is shared now, in one piece.
    again = one(engine, prompt(0))
    assert (again.num_cached_tokens, again.token_ids) == (99, cold.token_ids)


@pytest.mark.parametrize("how", ["hit", "restore", "recompute", "split"])
def test_what_is_used_is_evicted_last_from_the_first_step_on(engine: Engine, how: str) -> None:
    disk = stack_of(engine).tiers[1]
    assert isinstance(disk, DiskTier)
    one(engine, prompt(3, 40))
    if how == "hit":
        one(engine, prompt(0))
        one(engine, prompt(4, 40))
    else:
        evict(engine)
    if how == "split":
        split(engine)
    elif how != "hit":
        decide(engine, link=1e15 if how == "restore" else 1.0, disk=1.0)
    engine.add_request(prompt(0), GREEDY)
    stack_of(engine).flush()
    before = list(disk._files)
    engine.step()
    (request,) = engine._scheduler.running
    used = request.block_keys[:12]
    assert before[-1] not in used and list(disk._files)[-12:] == used[::-1]
    while engine.num_unfinished:
        engine.step()


def test_a_tail_that_is_gone_when_it_is_read_is_computed(engine: Engine, cold: Completion) -> None:
    choice, before = split(engine), engine.stats()
    for path in Path(engine.config.disk_cache_dir).iterdir():
        path.write_bytes(b"no block")
    answer, after = one(engine, prompt(0)), engine.stats()
    assert choice.stats.num_split == 1
    assert (answer.num_cached_tokens, answer.token_ids) == (0, cold.token_ids)
    assert after.prefilled_tokens - before.prefilled_tokens == LONG
    assert after.tiers["disk"].errors > before.tiers["disk"].errors
    assert choice.stats.actual_seconds == 0  # it was not carried out


@pytest.mark.parametrize("how", ["cancel", "preempt"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_split_that_is_broken_off_leaves_nothing(
    engine: Engine, cold: Completion, how: str, num_steps: int
) -> None:
    split(engine)
    name = engine.add_request(prompt(0), GREEDY)
    for _ in range(num_steps):
        engine.step()
    if how == "cancel":
        assert engine.cancel(name)
    else:
        (request,) = engine._scheduler.running
        engine._preempt(request)
        assert request.restore is None
        assert engine.collect([name])[0].token_ids == cold.token_ids
    engine.check_invariants()
    engine._restores.advance([], lambda request: None, idle=False)


def test_a_beam_search_takes_all_of_it_or_nothing(engine: Engine) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    wanted = [answer.token_ids for answer in engine.beam_search(prompt(0), params)]
    evict(engine)
    choice = split(engine)
    answers = engine.beam_search(prompt(0), params)
    assert [answer.token_ids for answer in answers] == wanted
    assert choice.stats.num_split == 0
    assert choice.stats.num_restored + choice.stats.num_recomputed == 1


def test_restores_and_prefills_teach(engine: Engine) -> None:
    choice = decide(engine, link=1e15)

    def known() -> CostModel:
        assert choice.costs is not None
        return choice.costs

    thought = known().hardware.efficiency.link
    one(engine, prompt(0))
    assert known().hardware.efficiency.link < thought / 10
    for _ in range(8):
        choice.computed(0, 32, 2.0)
    assert known().seconds_to_recompute(0, 32) == pytest.approx(2.0)
    for _ in range(8):
        choice.computed(0, 3, 1000.0)  # too short to tell anything
    assert known().seconds_to_recompute(0, 32) == pytest.approx(2.0)


def test_a_tier_that_once_was_slow_is_tried_again(tiny: LoadedModel) -> None:
    shape = shape_of(tiny.model.config, param_dtype_bytes=4, kv_dtype_bytes=4)
    hardware = replace(HARDWARE["h100"], peak_flops=1e9, peak_memory_bytes=1e15)
    costs = CostModel(shape, hardware, chunk_size=32)
    tiers = ["host"] * 4

    def seconds_to_restore(choice: RestoreChoice) -> float:
        assert choice.costs is not None
        return choice.costs.seconds_to_restore("host", 4 * SIZE)

    def decision(choice: RestoreChoice) -> str:
        plan = choice.choose(0, tiers, may_split=False)[2].plan
        assert plan is not None
        return plan.decision

    choice = RestoreChoice(costs, SIZE)
    at_first, to_compute = seconds_to_restore(choice), costs.seconds_to_recompute(0, 4 * SIZE)
    assert at_first < to_compute and decision(choice) == "restore"
    choice.costs = fit_restore(costs, "host", 4 * SIZE, 2 * to_compute)
    decisions = [decision(choice) for _ in range(40)]
    assert decisions == ["recompute"] * 35 + ["restore"] * 5

    slow = RestoreChoice(fit_restore(costs, "host", 4 * SIZE, 2 * to_compute), SIZE)
    believed = seconds_to_restore(slow)
    assert {decision(slow) for _ in range(80)} == {"recompute"}
    assert seconds_to_restore(slow) == believed


def test_an_engine_with_tiers_measures_its_machine(tiny: LoadedModel, tmp_path: Path) -> None:
    engine = tiny_engine(
        tiny, host_cache_gib=0.001, disk_cache_dir=str(tmp_path), restore_policy="cost"
    )
    costs = engine._restores.choice.costs
    assert costs is not None and costs.chunk_size == 32
    assert {"host", "disk"} <= set(costs.tiers)
    assert costs.shape.kv_dtype_bytes == costs.shape.param_dtype_bytes == 4
    assert list(tmp_path.iterdir()) == []
    engine.close()
    without = tiny_engine(tiny)
    assert without._restores.choice.costs is None
    with pytest.raises(ValueError, match="restore_policy='never'"):
        tiny_engine(tiny, restore_policy="never")


def test_eviction_knows_what_restoring_costs_where_all_of_the_device_lies_below(
    tiny: LoadedModel,
) -> None:
    def most(num_blocks: int, host_blocks: int, policy: str = "cost") -> float:
        gib = host_blocks * BLOCK_GIB
        engine = tiny_engine(tiny, num_blocks=num_blocks, host_cache_gib=gib, restore_policy=policy)
        found = float(engine._runner._state.policy.most)
        choice = engine._restores.choice
        if choice.costs is not None and host_blocks >= num_blocks:
            assert found == pytest.approx(choice.cost_of_restoring("host"))
        engine.reset_cache()
        assert float(engine._runner._state.policy.most) == found
        engine.close()
        return found

    assert 0 < most(24, 100) < np.inf
    assert most(24, 10) == np.inf  # evicted blocks are hardly there either
    assert most(24, 100, policy="always") == np.inf


def test_a_disk_that_cannot_be_measured_is_thought_to_be_slow(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    with_disk = tiny_engine(tiny, num_blocks=20)
    config = replace(
        with_disk.config, disk_cache_dir=str(gone), disk_cache_gib=1.0, restore_policy="cost"
    )
    costs = choice_for(with_disk.loaded.model, config, with_disk._runner.layout).costs
    assert costs is not None and costs.hardware.peak_disk_read_bytes == 5e8
    assert "could not be measured" in caplog.text


def test_choices_are_metrics(engine: Engine) -> None:
    decide(engine, link=1e15)
    one(engine, prompt(0))
    text = ServerMetrics("tiny").render(engine.stats())[0].decode()
    assert 'octavo:restore_choices_total{choice="restored",model_name="tiny"} 1.0' in text
    assert 'octavo:restore_choices_total{choice="split",model_name="tiny"} 0.0' in text
    for name in ("predicted", "actual", "regret"):
        assert f"octavo:restore_{name}_seconds_total" in text
    plain = ServerMetrics("tiny").render(replace(engine.stats(), tiers={}))[0].decode()
    assert "octavo:restore" not in plain
    assert engine.stats().restores != RestoreStats()
