"""Load or recompute: the plan is the soonest one that there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel, plan_restore

SHAPE = MODEL_SHAPES["llama-3.1-8b"]
SIZE = 16


def costs_with(**rates: float) -> CostModel:
    hardware = replace(HARDWARE["h100"], **rates)
    return CostModel(SHAPE, hardware, chunk_size=512)


FAST = costs_with()
LEVEL_DISK = costs_with(peak_disk_read_bytes=3e9)  # about as slow as computing


def all_plans(costs: CostModel, first: int, tiers: list[str]) -> dict[tuple[int, int], float]:
    """Seconds of every (start, stop), by the definition."""
    n, plans = len(tiers), {}
    for start in range(n + 1):
        for stop in range(start, n + 1):
            head = (first, first + start * SIZE)
            tail = (first + stop * SIZE, first + n * SIZE)
            # What is computed is computed in one go where nothing comes between.
            computed = costs.seconds_to_recompute(first, first + n * SIZE)
            computed -= costs.seconds_to_recompute(first, first + stop * SIZE) if stop > 0 else 0
            before = costs.seconds_to_recompute(*head) if start else 0.0
            read = sum(costs.seconds_to_restore(tier, SIZE) for tier in tiers[start:stop])
            put = costs.seconds_to_restore("host", SIZE) * (stop - start)
            plans[start, stop] = max(before + put, read) + (computed if tail[0] < tail[1] else 0.0)
    return plans


@pytest.mark.parametrize("tiers", [["host"] * 60, ["disk"] * 60, ["host"] * 25 + ["disk"] * 35])
@pytest.mark.parametrize("disk", [5e6, 5e7, 3e8, 6.5e9])
@pytest.mark.parametrize("first", [0, 4096, 100_000])
def test_no_plan_is_much_sooner_than_the_chosen_one(tiers, disk, first):
    costs = costs_with(peak_disk_read_bytes=disk)
    plan = plan_restore(costs, first, SIZE, tiers)
    every = all_plans(costs, first, tiers)
    assert plan.seconds >= min(every.values()) * (1 - 1e-9)
    assert plan.seconds <= min(every.values()) / 0.9 * (1 + 1e-9)
    if plan.start < plan.stop:
        assert plan.seconds == pytest.approx(every[plan.start, plan.stop])
    assert plan.recompute_seconds == pytest.approx(every[0, 0])
    assert plan.restore_seconds == pytest.approx(every[0, len(tiers)])


def test_a_fast_tier_is_read_and_a_slow_one_is_not():
    plan = plan_restore(FAST, 0, SIZE, ["host"] * 100)
    assert (plan.start, plan.stop, plan.decision) == (0, 100, "restore")
    assert plan.seconds == plan.restore_seconds < plan.recompute_seconds
    crawling = costs_with(peak_disk_read_bytes=1e5)
    plan = plan_restore(crawling, 0, SIZE, ["disk"] * 100)
    assert plan.start == plan.stop and plan.decision == "recompute"
    assert plan.seconds == plan.recompute_seconds < plan.restore_seconds


def test_where_both_take_as_long_the_head_is_computed_while_the_tail_is_read():
    plan = plan_restore(LEVEL_DISK, 0, SIZE, ["disk"] * 2000)
    assert 0 < plan.start < plan.stop == 2000 and plan.decision == "split"
    assert plan.seconds < 0.9 * min(plan.recompute_seconds, plan.restore_seconds)


def test_deeper_stretches_are_restored_rather_than_computed():
    starts = [plan_restore(LEVEL_DISK, k, SIZE, ["disk"] * 500).start for k in (0, 60_000, 120_000)]
    assert all(a >= b for a, b in pairwise(starts)) and starts[0] > starts[-1]


def test_what_lies_far_away_is_computed_after_what_lies_near_has_come_back():
    crawling = costs_with(peak_disk_read_bytes=1e5)
    plan = plan_restore(crawling, 0, SIZE, ["host"] * 300 + ["disk"] * 300)
    assert (plan.start, plan.stop, plan.decision) == (0, 300, "split")


def test_without_splitting_it_is_one_or_the_other():
    plan = plan_restore(LEVEL_DISK, 0, SIZE, ["disk"] * 2000, may_split=False)
    assert plan.decision in ("restore", "recompute")
    assert plan.seconds == min(plan.recompute_seconds, plan.restore_seconds)


def test_bad_stretches_are_refused():
    with pytest.raises(ValueError, match="at least one block"):
        plan_restore(FAST, 0, SIZE, [])
    with pytest.raises(ValueError, match="tier='tape'"):
        plan_restore(FAST, 0, SIZE, ["tape"])
