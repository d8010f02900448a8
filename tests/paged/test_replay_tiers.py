"""The replay's tiers are the engine's, block by block, and their figures are those by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel
from octavo.paged.replay import make_report, make_tier_report, unlimited_hits
from octavo.paged.replay.lower_tiers import Runs, SimulatedTiers, tier_runs
from octavo.paged.replay.tier_report import restore_or_compute
from octavo.paged.tiers import DiskTier, HostTier, TierStack
from octavo.paged.tiers.block_file import file_bytes

from .replay_model import conversations, lru_hits, make_trace
from .tiers.blocks import BLOCK_BYTES, BLOCK_SIZE, SIZES, key, payload, tokens

COSTS = CostModel(MODEL_SHAPES["llama-3.1-70b"], HARDWARE["h100"], chunk_size=8)
# Where every stretch is sooner computed than read from disk.
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
        budget = disk * file_bytes(BLOCK_SIZE, BLOCK_BYTES)
        tiers = [HostTier(budget_bytes=host * BLOCK_BYTES, **SIZES)] if host else []
        tiers += [PatientDisk(folder, budget_bytes=budget, **SIZES)] if disk else []
        self.stack = TierStack(tiers, BLOCK_BYTES)
        self._names = [tier.name for tier in tiers]

    def num_held(self, blocks: list[int]) -> int:
        return self.stack.num_held([key(block) for block in blocks])

    def touch(self, blocks: list[int]) -> None:
        self.stack.touch([key(block) for block in blocks])

    def load(self, blocks: list[int]) -> list[int]:
        out = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
        asked = np.stack([tokens(block) for block in blocks])
        sources = self.stack.load([key(block) for block in blocks], asked, out)
        return [self._names.index(name) for name in sources]

    def save(self, blocks: list[int]) -> None:
        missing = [block for block in blocks if self.stack.is_missing(key(block))]
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
    simulated = SimulatedTiers([size for size in (host, disk) if size])
    paths = [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    seen = set()
    for _ in range(150):
        path = paths[rng.integers(len(paths))]
        path = path[: rng.integers(1, 1 + len(path))]
        first = int(rng.integers(len(path)))
        held = simulated.num_held(path[first:])
        assert real.num_held(path[first:]) == held
        if rng.random() < 0.7:
            for tiers in (real, simulated):
                tiers.touch(path[: first + held])
        if held and rng.random() < 0.7:
            sources = simulated.load(path[first : first + held])
            assert real.load(path[first : first + held]) == sources
            seen.update(sources)
        if rng.random() < 0.7:
            for tiers in (real, simulated):
                tiers.save(path[first:])
        assert real.held(range(40)) == [list(tier) for tier in simulated.tiers]
    assert seen == set(range(len(simulated.tiers)))


@pytest.mark.parametrize("seed", range(3))
def test_with_an_unlimited_disk_all_is_found_that_was_ever_computed(seed: int):
    trace = conversations(seed)
    for sizes in ([60, None], [None], [24, None]):
        hits = lru_hits(trace, 24)
        runs = tier_runs(trace, hits, 24, sizes, chunk_size=8)
        found = hits + np.bincount(runs.request, runs.num_blocks, trace.num_requests)
        # The last token is always computed, and with it the last block.
        most = np.minimum(unlimited_hits(trace), (trace.num_tokens - 1) // 4)
        np.testing.assert_array_equal(np.minimum(found, most), most)
    assert tier_runs(trace, hits, 24, [], chunk_size=8).request.size == 0


def test_runs_are_those_worked_out_by_hand():
    # 4 tokens a block. The device holds 3 blocks, host memory 3, the disk all.
    a, b = ["a", 1, 2], ["b", 1, 2]
    trace = make_trace(a, b, [*a, 3], a)
    trace.num_tokens[3] = 13  # its third block is full, and one token goes past it
    hits = np.array([0, 0, 0, 0], np.int32)
    runs = tier_runs(trace, hits, 4, [3, None], chunk_size=4)
    # Request 2: b has pushed a out of host memory. Bringing it back pushes out b; saving its
    # fourth block then costs host memory the first of a, which came back the longest ago. Request
    # 3 brings that one back, and what goes for it is the fourth.
    assert list(zip(*(c.tolist() for c in vars(runs).values()), strict=True)) == [
        (2, 1, 3),
        (3, 1, 1),
        (3, 0, 2),
    ]
    # Too large for the device: refused, and it changes nothing below.
    refused = tier_runs(trace, hits, 3, [3, None], chunk_size=4)
    assert list(zip(*(c.tolist() for c in vars(refused).values()), strict=True)) == [(3, 1, 3)]


def test_the_saved_seconds_are_those_worked_out_by_hand():
    trace = make_trace(list(range(40)), list(range(40)), tokens_per_block=512)
    hits = np.array([0, 5], np.int32)
    runs = Runs(
        request=np.array([1, 1, 1]), level=np.array([0, 1, 0]), num_blocks=np.array([4, 20, 10])
    )
    whole, rest = COSTS.seconds_to_recompute(0, 20480), COSTS.seconds_to_recompute(2560, 20480)

    def seconds(costs: CostModel, host: int, disk: int) -> float:
        restored = 512 * (5 + host + disk)
        moved = costs.seconds_to_restore("host", host * 512.0)
        moved += costs.seconds_to_restore("disk", disk * 512.0)
        return moved + costs.seconds_to_recompute(restored, 20480)

    found, chosen = restore_or_compute(trace, hits, runs, ("host", "disk"), COSTS)
    assert found.tolist() == pytest.approx([whole, seconds(COSTS, 14, 20)])
    assert chosen.tolist() == [True, True, True] and found[1] < rest
    # What lies beyond a stretch that is sooner computed is not got back either.
    found, chosen = restore_or_compute(trace, hits, runs, ("host", "disk"), SLOW_DISK)
    assert found.tolist() == pytest.approx([whole, seconds(SLOW_DISK, 4, 0)])
    assert chosen.tolist() == [True, False, False]
    # Nothing is got back if that is slower, and nothing is lost.
    one = Runs(request=np.array([1]), level=np.array([0]), num_blocks=np.array([34]))
    found, chosen = restore_or_compute(trace, hits, one, ("disk",), SLOW_DISK)
    assert found.tolist() == pytest.approx([whole, rest]) and not chosen.any()


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
            assert disk.num_restored_blocks == disk.num_found_blocks
            assert disk.hit_ratio > host.hit_ratio


def test_tiers_can_be_left_out_and_bounded():
    trace = conversations(2)
    hits = {("lru", 24): lru_hits(trace, 24)}
    results = make_tier_report(trace, hits, COSTS, host_blocks=0, disk_blocks=30)
    assert [result.tiers for result in results] == [{}, {"disk": 30}]
    (alone,) = make_tier_report(trace, hits, COSTS, host_blocks=0, disk_blocks=0)
    assert alone == results[0]
