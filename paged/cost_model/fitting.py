"""Efficiency from what a machine was seen to take: predictions learn from measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .model import CostModel
from .work import kv_bytes, num_chunks, prefill_work

# Least ratio of the singular values by which matrices and attention are told apart.
_TOLD_APART = 0.2
_SHARE: dict[str, str] = {"host": "link", "disk": "disk", "remote": "remote"}


def fit_prefill(costs: CostModel, measured: Sequence[tuple[int, int, float]]) -> CostModel:
    """The same model with the shares of FLOP/s that explain measured prefills best.

    From prefills of very different depths, the shares of matrices and of attention are told apart
    by least squares of relative errors; from others, that of attention is left as it was. Those
    whose matrices wait for the weights (hits that leave few tokens) say nothing of FLOP/s and are
    left out of that; where none remain, or what was measured is sooner than attention alone, all of
    compute and memory is scaled as one.

    Args:
        costs: what is to be corrected.
        measured: `(start, stop, seconds)` of prefills, one sequence alone.

    Raises:
        ValueError: nothing was measured, or seconds are not positive numbers.
    """
    if not measured:
        raise ValueError("nothing to fit: give at least one (start, stop, seconds)")
    rows, scales = [], []
    for start, stop, seconds in measured:
        if not 0 <= start < stop:
            raise ValueError(f"{start=} must be from 0 to below {stop=}")
        overhead = costs.hardware.dispatch_seconds * num_chunks(stop - start, costs.chunk_size)
        if not (math.isfinite(seconds) and seconds > overhead):
            raise ValueError(f"{seconds=} must be a number above the {overhead} s of dispatches")
        work = prefill_work(costs.device_shape, start, stop, chunk_size=costs.chunk_size)
        if work.matmul_flops >= costs.machine.ridge * work.weight_bytes:
            ideal = np.array([work.matmul_flops, work.attention_flops]) / costs.machine.peak_flops
            rows.append(ideal / (seconds - overhead))
        scales.append((costs.seconds_to_recompute(start, stop) - overhead) / (seconds - overhead))
    matrix = np.array(rows).reshape(-1, 2)
    efficiency = costs.hardware.efficiency
    # The better known of the two is believed where they cannot be told apart.
    inverse = np.array([0.0, 1 / efficiency.attention])
    told, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=_TOLD_APART)
    if rank == 2 and np.all(told > 0):
        inverse = told
    elif rows:
        left = 1 - matrix[:, 1] * inverse[1]
        inverse[0] = matrix[:, 0] @ left / (matrix[:, 0] @ matrix[:, 0])
    if rows and inverse[0] > 0:
        matmul, attention = (float(1 / share) for share in inverse)
        efficiency = replace(efficiency, matmul=matmul, attention=attention)
    else:
        scale = float(np.exp(np.mean(np.log(scales))))
        efficiency = replace(
            efficiency,
            matmul=efficiency.matmul * scale,
            attention=efficiency.attention * scale,
            memory=efficiency.memory * scale,
        )
    return replace(costs, hardware=replace(costs.hardware, efficiency=efficiency))


def fit_hits(costs: CostModel, measured: Sequence[tuple[int, int, float]]) -> CostModel:
    """The same model with what a short prefill takes by itself, and by the context that it reads.

    Hits that leave few tokens wait for keys and values: how much longer they take behind a longer
    prefix tells the bandwidth at which these are read, and the rest is each chunk's own.

    Args:
        costs: what is to be corrected.
        measured: `(start, stop, seconds)` of hits of one chunk behind prefixes of at least two
            lengths, one sequence alone.

    Raises:
        ValueError: fewer were measured, or longer prefixes took no longer.
    """
    if len({start for start, _, _ in measured}) < 2:
        raise ValueError("hits behind two lengths at least tell what a longer one takes")
    num_bytes = [float(kv_bytes(costs.device_shape, stop)) for _, stop, _ in measured]
    seconds_of_hits = [seconds for _, _, seconds in measured]
    slope, own = np.polyfit(num_bytes, seconds_of_hits, 1)
    # A fit of equal times rounds to a slope of either sign, which is no bandwidth.
    if not slope * np.ptp(num_bytes) > 1e-6 * max(seconds_of_hits):
        raise ValueError("hits behind longer prefixes took no longer: measure longer ones")
    context = float(1 / slope / costs.machine.peak_memory_bytes)
    efficiency = replace(costs.hardware.efficiency, context=context)
    idle = replace(costs.hardware, efficiency=efficiency, dispatch_seconds=0.0)
    start, stop, _ = measured[0]
    work = prefill_work(costs.device_shape, start, stop, chunk_size=costs.chunk_size)
    seconds = replace(costs, hardware=idle).seconds_to_recompute(start, stop)
    own = max(float(own) - (float(seconds) - float(slope) * work.kv_bytes), 0.0)
    return replace(costs, hardware=replace(idle, dispatch_seconds=own))


def fit_restore(costs: CostModel, tier: str, num_tokens: int, seconds: float) -> CostModel:
    """The same model with the share of a tier's bandwidth that explains a measured restore.

    Raises:
        ValueError: the machine has no such tier, or a number is not positive.
    """
    if num_tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{num_tokens=} and {seconds=} must be positive")
    predicted = costs.seconds_to_restore(tier, num_tokens)
    efficiency = costs.hardware.efficiency
    share = getattr(efficiency, _SHARE[tier]) * predicted / seconds
    efficiency = replace(efficiency, **{_SHARE[tier]: share})
    return replace(costs, hardware=replace(costs.hardware, efficiency=efficiency))
