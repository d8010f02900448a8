"""What tiers below the device would have saved, in predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..cost_model import CostModel
from .lower_tiers import Runs, tier_runs
from .trace import Trace

HOST_FACTOR = 4
"""Blocks of host memory per block of the device, if nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TierResult:
    """What one policy on the device and some tiers below it would have made of a trace.

    A request gets back as many of the blocks below, from the first on, as make it sooner done by
    prediction: all, none, or those before the blocks of a slower tier. What it does not get back
    it computes.

    Attributes:
        policy: the device's.
        capacity: blocks of the device.
        tiers: blocks of each tier below, the fastest first; None if unlimited. Without any, this
            is the device alone.
        num_found_blocks: in each, blocks that were there and not on the device or faster.
        num_restored_blocks: those of them that were got back.
        hit_ratio: blocks that were not computed, over all that were looked up.
        prefill_seconds: predicted, one request after the other, restoring included.
        saved_seconds: what that is less than without any cache.
    """

    policy: str
    capacity: int
    tiers: Mapping[str, int | None]
    num_found_blocks: Mapping[str, int]
    num_restored_blocks: Mapping[str, int]
    hit_ratio: float
    prefill_seconds: float
    saved_seconds: float


def make_tier_report(
    trace: Trace,
    hits: Mapping[tuple[str, int], np.ndarray],
    costs: CostModel,
    *,
    host_blocks: int | None = None,
    disk_blocks: int | None = None,
) -> list[TierResult]:
    """Figures of the device alone, with host memory, and with a disk below that.

    Args:
        trace: the requests.
        hits: `int32[R]` blocks that each request found on the device, by policy and capacity.
        costs: whose seconds to predict.
        host_blocks: blocks of host memory, 0 for none; None means four times the device's.
        disk_blocks: blocks on disk, 0 for none; None means all there are.

    Returns:
        For each capacity, from the smallest, and each policy in the order given: a result for the
        device, and one more with each tier.
    """
    results = []
    for capacity in sorted({capacity for _, capacity in hits}):
        host = HOST_FACTOR * capacity if host_blocks is None else host_blocks
        sizes = {"host": host, "disk": disk_blocks}
        names = [name for name, size in sizes.items() if size != 0]
        for (policy, size), found in hits.items():
            if size != capacity:
                continue
            for count in range(len(names) + 1):
                tiers = {name: sizes[name] for name in names[:count]}
                results.append(_result(trace, policy, capacity, found, tiers, costs))
    return results


def _result(
    trace: Trace,
    policy: str,
    capacity: int,
    hits: np.ndarray,
    tiers: Mapping[str, int | None],
    costs: CostModel,
) -> TierResult:
    stop = trace.num_tokens.astype(np.float64)
    none = np.zeros_like(stop)
    runs = tier_runs(trace, hits, capacity, tuple(tiers.values()), chunk_size=costs.chunk_size)
    seconds, chosen = restore_or_compute(trace, hits, runs, tuple(tiers), costs)

    def blocks(counted: np.ndarray) -> dict[str, int]:
        return {
            name: int(runs.num_blocks[counted & (runs.level == level)].sum())
            for level, name in enumerate(tiers)
        }

    restored = blocks(chosen)
    return TierResult(
        policy=policy,
        capacity=capacity,
        tiers=tiers,
        num_found_blocks=blocks(np.ones_like(chosen)),
        num_restored_blocks=restored,
        hit_ratio=float((hits.sum() + sum(restored.values())) / max(trace.num_blocks.sum(), 1)),
        prefill_seconds=float(seconds.sum()),
        saved_seconds=float((costs.seconds_to_recompute(none, stop) - seconds).sum()),
    )


def restore_or_compute(
    trace: Trace, hits: np.ndarray, runs: Runs, tiers: tuple[str, ...], costs: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """The sooner of the two for every request.

    A run is got back whole or not at all: its blocks cost the same each, and the further in a
    prompt, the more they cost to compute.

    Args:
        trace: the requests.
        hits: `int32[R]` blocks that each found on the device.
        runs: what the tiers have after these, N runs.
        tiers: their names, by level.
        costs: whose seconds to predict.

    Returns:
        `float64[R]` seconds of each request, and `bool[N]` the runs that are got back.
    """
    stop, size = trace.num_tokens.astype(np.float64), float(trace.tokens_per_block)
    start = np.minimum(hits * size, stop - 1)  # the last token is always computed
    best = np.asarray(costs.seconds_to_recompute(start, stop), np.float64).copy()
    rates = np.array([costs.seconds_to_restore(name, 1.0) for name in tiers], np.float64)
    restore = _sums(runs, runs.num_blocks * size * rates[runs.level])
    end = start[runs.request] + _sums(runs, runs.num_blocks * size)
    seconds = restore + costs.seconds_to_recompute(end, stop[runs.request])
    np.minimum.at(best, runs.request, seconds)
    until = start.copy()  # where restoring ends
    wins = seconds == best[runs.request]
    np.maximum.at(until, runs.request[wins], end[wins])
    return best, end <= until[runs.request]


def _sums(runs: Runs, values: np.ndarray) -> np.ndarray:
    """Of `values: float64[N]`, those of a request's runs up to each of them."""
    sums = values.tolist()
    for i in np.flatnonzero(np.diff(runs.request) == 0).tolist():
        sums[i + 1] += sums[i]
    return np.array(sums, np.float64)
