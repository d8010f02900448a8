"""What tiers below the device would have saved, in predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..cost_model import CostModel
from .lower_tiers import replay_below
from .trace import Trace

HOST_FACTOR = 4
"""Blocks of host memory per block of the device, if nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TierResult:
    """What one policy on the device and some tiers below it would have made of a trace.

    A request gets back those of the blocks below that `plan_restore` says, as in the engine, if
    that makes it sooner done by prediction. What it does not get back it computes.

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
    uncached = costs.seconds_to_recompute(np.zeros_like(stop), stop)
    below = replay_below(trace, hits, capacity, tiers, costs)
    num_hits = hits.sum() + below.num_restored.total()
    return TierResult(
        policy=policy,
        capacity=capacity,
        tiers=tiers,
        num_found_blocks={name: below.num_found[name] for name in tiers},
        num_restored_blocks={name: below.num_restored[name] for name in tiers},
        hit_ratio=float(num_hits / max(trace.num_blocks.sum(), 1)),
        prefill_seconds=float(below.seconds.sum()),
        saved_seconds=float((uncached - below.seconds).sum()),
    )
