"""The replay's tiers are the engine's, block by block, and their figures are those by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel, plan_restore
from octavo.paged.replay import make_report, make_tier_report, unlimited_hits
from octavo.paged.replay.lower_tiers import SimulatedTiers, replay_below
from octavo.paged.tiers import DiskTier, HostTier, TierStack
from octavo.paged.tiers.block_format import num_bytes

from .replay_model import conversations, lru_hits, make_trace
from .tiers.blocks import BLOCK_BYTES, BLOCK_SIZE, SIZES, key, payload, tokens

COSTS = CostModel(MODEL_SHAPES["llama-3.1-70b"], HARDWARE["h100"])
# Where every stretch is sooner read from disk than computed, and the other way round.
FAST_DISK = replace(COSTS, hardware=replace(COSTS.hardware, peak_disk_read_bytes=1e12))
SLOW_DISK = replace(COSTS, hardware=replace(COSTS.hardware, peak_disk_read_bytes=1e6))
MANY = 10_000


class PatientDisk(DiskTier):
    """Evicts before the next block is looked at: else that is a matter of time."""

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        super().put(key, tokens, payload)
        self.flush()


class RealTiers:
    """A `TierStack` that takes symbols, and waits until what it does is done."""

    def __init__(self, folder: Path, host: int, disk: int):
        budget = disk * num_bytes(BLOCK_SIZE, BLOCK_BYTES)
        tiers = [HostTier(budget_bytes=host * BLOCK_BYTES, **SIZES)] if host else []
        tiers += [PatientDisk(folder, budget_bytes=budget, **SIZES)] if disk else []
        self.stack = TierStack(tiers, BLOCK_BYTES)

    def nearest(self, blocks: list[int]) -> list[str]:
        return self.stack.nearest([key(block) for block in blocks])

    def touch(self, blocks: list[int]) -> None:
        self.stack.touch([key(block) for block in blocks])

    def load(self, blocks: list[int]) -> None:
        out = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
        asked = np.stack([tokens(block) for block in blocks])
        assert len(self.stack.load([key(block) for block in blocks], asked, out)) == len(blocks)

    def save(self, blocks: list[int]) -> None:
        missing = [block for block in blocks if self.stack.missing([key(block)])]
        if missing:
            packed = np.stack([payload(block) for block in missing])
            self.stack.save(
                [key(b) for b in missing], np.stack([tokens(b) for b in missing]), packed
            )
            self.stack.flush()

    def held(self, symbols: range) -> list[list[int]]:
        """What each tier holds, the least recently used first."""
        number = {key(symbol): symbol for symbol in symbols}
        orders = [
            vars(tier)["_slots" if "_slots" in vars(tier) else "_files"]
            for tier in self.stack.tiers
        ]
        return [[number[found] for found in order] for order in orders]


@pytest.mark.parametrize(("host", "disk"), [(7, 20), (7, 0), (0, 12), (5, MANY)])
def test_the_simulated_tiers_hold_what_the_real_ones_do(
    tmp_path: Path, request: pytest.FixtureRequest, host: int, disk: int
):
    rng = np.random.default_rng(host * 100 + disk)
    real = RealTiers(tmp_path, host, disk)
    request.addfinalizer(real.stack.close)
    simulated = SimulatedTiers({k: v for k, v in (("host", host), ("disk", disk)) if v})
    paths = [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    seen = set()
    for _ in range(150):
        path = paths[rng.integers(len(paths))]
        path = path[: rng.integers(1, 1 + len(path))]
        first = int(rng.integers(len(path)))
        found = simulated.nearest(path[first:])
        assert real.nearest(path[first:]) == found
        seen.update(found)
        if rng.random() < 0.7:
            for tiers in (real, simulated):
                tiers.touch(path[: first + len(found)])
        if found and rng.random() < 0.7:
            start = first + int(rng.integers(len(found)))
            for tiers in (real, simulated):
                tiers.load(path[start : first + len(found)])
        if rng.random() < 0.7:
            for tiers in (real, simulated):
                tiers.save(path[first:])
        assert real.held(range(40)) == [list(tier) for tier in simulated.tiers.values()]
    assert seen == set(simulated.tiers)


@pytest.mark.parametrize("seed", range(3))
def test_with_an_unlimited_disk_all_is_found_that_was_ever_computed(seed: int):
    trace = conversations(seed)
    hits = lru_hits(trace, 24)
    # The last token is always computed, and with it the last block.
    most = np.minimum(unlimited_hits(trace), (trace.num_tokens - 1) // 4)
    missing = int(np.maximum(most - hits, 0).sum())
    for sizes in ({"host": 60, "disk": None}, {"disk": None}, {"host": 24, "disk": None}):
        below = replay_below(trace, hits, 24, sizes, COSTS)
        assert below.num_found.total() == missing
        assert set(below.num_found) == set(sizes)
    assert not replay_below(trace, hits, 24, {}, COSTS).num_found


def test_what_is_found_and_saved_is_as_worked_out_by_hand():
    a, b = [("a", i) for i in range(20)], [("b", i) for i in range(20)]
    trace = make_trace(a, b, [*a, ("a", 20)], a, tokens_per_block=512)
    trace.num_tokens[3] += 1  # its last block is full, and one token goes past it
    nothing = np.zeros(4, np.int32)
    below = replay_below(trace, nothing, 21, {"host": 20, "disk": None}, FAST_DISK)
    # Request 2: b has pushed a out of host memory. Bringing it back pushes out b; its last block
    # is saved in the place of a's first, which came back the longest ago. Request 3 brings that
    # one back in the place of the last.
    assert below.num_found == below.num_restored == {"disk": 20 + 1, "host": 19}
    end = 20 * 512
    computed = FAST_DISK.seconds_to_recompute(0, end)
    plans = [
        plan_restore(FAST_DISK, 0, 512, tiers)
        for tiers in (["disk"] * 20, ["disk"] + ["host"] * 19)
    ]
    assert [plan.decision for plan in plans] == ["restore", "restore"]
    assert below.seconds.tolist() == pytest.approx(
        [
            computed,
            computed,
            plans[0].restore_seconds + FAST_DISK.seconds_to_recompute(end, end + 512),
            plans[1].restore_seconds + FAST_DISK.seconds_to_recompute(end, end + 1),
        ]
    )
    # What takes longer to restore is found and computed.
    below = replay_below(trace, nothing, 21, {"disk": None}, SLOW_DISK)
    assert below.num_found == {"disk": 40} and not below.num_restored
    assert (
        below.seconds.tolist()
        == COSTS.seconds_to_recompute(np.zeros(4), trace.num_tokens * 1.0).tolist()
    )
    # Too large for the device: refused, and it changes nothing below.
    below = replay_below(trace, nothing, 20, {"host": 20, "disk": None}, COSTS)
    assert below.num_found == {"disk": 20}


def test_a_part_that_is_worth_it_is_restored():
    path = list(range(200))
    trace = make_trace(path, path, tokens_per_block=512)
    hits = np.array([0, 2], np.int32)
    # So that the deep end of a long prompt is sooner read than computed, and only that.
    costs = replace(COSTS, hardware=replace(COSTS.hardware, peak_disk_read_bytes=9e8))
    below = replay_below(trace, hits, 200, {"disk": None}, costs)
    plan = plan_restore(costs, 1024, 512, ["disk"] * 197)
    assert plan.decision == "split" and 0 < plan.start < plan.stop == 197
    assert below.num_found == {"disk": 197}
    assert below.num_restored == {"disk": plan.stop - plan.start}
    rest = costs.seconds_to_recompute(199 * 512, 200 * 512)
    assert below.seconds[1] == pytest.approx(plan.seconds + rest)


@pytest.mark.parametrize("costs", [COSTS, SLOW_DISK], ids=["usual", "slow disk"])
def test_no_tier_ever_costs_anything_and_what_is_computed_is_no_hit(costs: CostModel):
    trace = conversations(1)
    trace = replace(trace, tokens_per_block=512, num_tokens=trace.num_tokens * 128)
    hits = {(name, size): lru_hits(trace, size) for size in (40, 24) for name in ("lru", "other")}
    results = make_tier_report(trace, hits, costs)
    alone = {(r.policy, r.capacity): r for r in make_report(trace, hits, costs)}
    assert [(r.capacity, r.policy, r.tiers) for r in results] == [
        (size, name, tiers)
        for size in (24, 40)
        for name in ("lru", "other")
        for tiers in ({}, {"host": 4 * size}, {"host": 4 * size, "disk": None})
    ]
    whole = costs.seconds_to_recompute(np.zeros(trace.num_requests), trace.num_tokens * 1.0).sum()
    for device, host, disk in zip(results[::3], results[1::3], results[2::3], strict=True):
        same = alone[device.policy, device.capacity]
        assert device.hit_ratio == same.hit_ratio < host.hit_ratio <= disk.hit_ratio
        assert device.prefill_seconds == pytest.approx(same.prefill_seconds)
        assert device.prefill_seconds > host.prefill_seconds >= disk.prefill_seconds
        for result in (device, host, disk):
            assert result.saved_seconds == pytest.approx(whole - result.prefill_seconds)
        assert disk.num_found_blocks["disk"] > 0
        if costs is SLOW_DISK:
            assert disk.num_restored_blocks["disk"] == 0
        else:
            assert host.num_restored_blocks == host.num_found_blocks
            assert disk.hit_ratio > host.hit_ratio


def test_tiers_can_be_left_out_and_bounded():
    trace = conversations(2)
    hits = {("lru", 24): lru_hits(trace, 24)}
    results = make_tier_report(trace, hits, COSTS, host_blocks=0, disk_blocks=30)
    assert [result.tiers for result in results] == [{}, {"disk": 30}]
    (alone,) = make_tier_report(trace, hits, COSTS, host_blocks=0, disk_blocks=0)
    assert alone == results[0]
