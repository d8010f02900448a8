"""Load or recompute: which part of a stretch that lower tiers hold is worth bringing back.

Computing a token costs more the deeper it is, restoring one costs the same everywhere. So where
both take their turns, a stretch is computed up to some token and restored from there; and blocks
from disk or network can be read while what comes before them is computed. (Jin et al., "Compute Or
Load KV Cache? Why Not Both?", arXiv:2410.03065, meets in the middle in the same way.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .model import CostModel

# Doing both must win by this much over the better one of the two.
_LEAST_GAIN = 0.1
# Places where the tier changes that are tried as ends of what is restored.
_MAX_ENDS = 16


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """What to do about a stretch of n blocks that lower tiers hold.

    Attributes:
        start, stop: the blocks of it that are restored; those before and after are computed. Equal
            if none is.
        seconds: predicted for the whole stretch.
        recompute_seconds, restore_seconds: predicted if all of it were computed, or restored.
    """

    start: int
    stop: int
    seconds: float
    recompute_seconds: float
    restore_seconds: float

    @property
    def decision(self) -> str:
        """ "recompute", "restore" or "split"."""
        if self.start == self.stop:
            return "recompute"
        return "restore" if self.seconds == self.restore_seconds else "split"


def plan_restore(
    costs: CostModel,
    first_token: int,
    block_size: int,
    tiers: Sequence[str],
    *,
    may_split: bool = True,
) -> RestorePlan:
    """The soonest way to get a stretch's keys and values, the tokens before it being cached.

    Args:
        costs: what computing and restoring takes.
        first_token: where the stretch begins.
        block_size: B.
        tiers: the nearest tier that holds it, for each of the n blocks of the stretch.
        may_split: whether some of it may be computed, and some restored.

    Raises:
        ValueError: nothing is held, or a tier is none of the machine's.
    """
    if not tiers:
        raise ValueError("a stretch has at least one block")
    n = len(tiers)
    begins = np.full(n, first_token)
    ends = begins + block_size * np.arange(1, n + 1)
    compute = np.concatenate([[0.0], costs.seconds_to_recompute(begins, ends)])
    per_tier = {tier: costs.seconds_to_restore(tier, block_size) for tier in set(tiers)}
    read = np.concatenate([[0.0], np.cumsum([per_tier[tier] for tier in tiers])])
    link = costs.seconds_to_restore("host", block_size)
    recompute, restore = float(compute[n]), float(read[n])
    best = min((recompute, n, n), (restore, 0, n))
    changes = [i for i in range(1, n) if tiers[i] != tiers[i - 1]]
    for stop in [*changes[:_MAX_ENDS], n] if may_split else ():
        starts = np.arange(stop)
        # The engine's thread computes and puts in place; others read meanwhile.
        busy = compute[starts] + link * (stop - starts)
        seconds = np.maximum(busy, read[stop] - read[starts]) + (compute[n] - compute[stop])
        start = int(np.argmin(seconds))
        if float(seconds[start]) < (1 - _LEAST_GAIN) * best[0]:
            best = float(seconds[start]), start, stop
    seconds, start, stop = best
    return RestorePlan(
        start=start,
        stop=stop,
        seconds=seconds,
        recompute_seconds=recompute,
        restore_seconds=restore,
    )
