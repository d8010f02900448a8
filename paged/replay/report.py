"""Figures of a replay, from the blocks that every request found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..cost_model import CostModel, ModelShape, prefill_flops
from .optimum import optimum_hits, unlimited_hits
from .trace import Trace

LRU = "lru"
OPTIMUM = "optimum"
UNLIMITED = "unlimited"


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What one policy would have made of a trace with one capacity.

    Attributes:
        policy: its name; also `"optimum"` (offline) and `"unlimited"`.
        capacity: blocks of the cache; None if unlimited.
        num_requests: requests in the trace.
        num_refused: requests that ask for more blocks than there are: computed in full.
        num_hit_blocks: blocks that were found.
        hit_ratio: the same, over all blocks that were looked up.
        recomputed_tokens: prompt tokens that were not found, at least one per request.
        recomputed_flops: what computing them takes.
        saved_flops_share: of the FLOPs without any cache, the part not computed.
        prefill_seconds: predicted, one request after the other.
        gap_closed: the part of the way from LRU's saved FLOPs to the optimum's at this capacity;
            None without those two, or where they are equal. Beyond 0 and 1 it may go: a policy
            can lose to LRU, and the optimum is one of blocks, not of FLOPs.
    """

    policy: str
    capacity: int | None
    num_requests: int
    num_refused: int
    num_hit_blocks: int
    hit_ratio: float
    recomputed_tokens: int
    recomputed_flops: float
    saved_flops_share: float
    prefill_seconds: float
    gap_closed: float | None


def make_report(
    trace: Trace,
    hits: Mapping[tuple[str, int], np.ndarray],
    costs: CostModel,
) -> list[ReplayResult]:
    """Figures of policies next to those of the optimum and of an unlimited cache.

    Args:
        trace: the requests.
        hits: `int32[R]` blocks that each request found, by policy and capacity.
        costs: whose FLOPs to count, and whose seconds to predict.

    Returns:
        For each capacity, from the smallest, the policies in the order given and then the
        optimum; last the unlimited cache.
    """
    results = []
    for capacity in sorted({capacity for _, capacity in hits}):
        given = {policy: found for (policy, size), found in hits.items() if size == capacity}
        columns = {**given, OPTIMUM: optimum_hits(trace, capacity)}
        saved = {policy: _saved_share(trace, columns[policy], costs.shape) for policy in columns}
        gap = saved[OPTIMUM] - saved[LRU] if LRU in saved else 0.0
        for policy, found in columns.items():
            closed = (saved[policy] - saved[LRU]) / gap if gap else None
            results.append(_result(trace, policy, capacity, found, costs, closed))
    unlimited = unlimited_hits(trace)
    results.append(_result(trace, UNLIMITED, None, unlimited, costs, None))
    return results


def default_capacities(trace: Trace) -> list[int]:
    """Capacities 1, 2 and 5 times powers of ten that tell policies apart on this trace.

    From the largest request (below it, some are refused) to all distinct blocks (from there on,
    nothing is ever evicted); just the latter if no such number lies between.
    """
    least, most = int(trace.num_blocks.max()), trace.num_symbols
    ladder = [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5)]
    return [size for size in ladder if least <= size < most] or [max(most, 1)]


def _result(
    trace: Trace,
    policy: str,
    capacity: int | None,
    hits: np.ndarray,
    costs: CostModel,
    gap_closed: float | None,
) -> ReplayResult:
    start, stop = _span(trace, hits)
    num_blocks = trace.num_blocks
    refused = 0 if capacity is None else int(np.sum(num_blocks > capacity))
    return ReplayResult(
        policy=policy,
        capacity=capacity,
        num_requests=trace.num_requests,
        num_refused=refused,
        num_hit_blocks=int(np.sum(hits)),
        hit_ratio=float(np.sum(hits) / max(np.sum(num_blocks), 1)),
        recomputed_tokens=int(np.sum(stop - start)),
        recomputed_flops=float(np.sum(prefill_flops(costs.shape, start, stop))),
        saved_flops_share=_saved_share(trace, hits, costs.shape),
        prefill_seconds=float(np.sum(costs.seconds_to_recompute(start, stop))),
        gap_closed=gap_closed,
    )


def _saved_share(trace: Trace, hits: np.ndarray, shape: ModelShape) -> float:
    start, stop = _span(trace, hits)
    whole = np.sum(prefill_flops(shape, np.zeros_like(stop), stop))
    return float(1 - np.sum(prefill_flops(shape, start, stop)) / whole)


def _span(trace: Trace, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From where to where each request computes, `float64[R]`: FLOPs may pass `2**63`."""
    if hits.shape != (trace.num_requests,):
        raise ValueError(f"{hits.shape=} must be [R] = {(trace.num_requests,)}")
    if np.any((hits < 0) | (hits > trace.num_blocks)):
        raise ValueError("hits must be from 0 to the number of blocks of each request")
    stop = trace.num_tokens.astype(np.float64)
    # The last token is always computed: its logits are needed.
    return np.minimum(hits * float(trace.tokens_per_block), stop - 1), stop
