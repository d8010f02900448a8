"""What a request is still to get from a tier below the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..paged.cost_model import RestorePlan
from .staging import Loaded


@dataclass(frozen=True, kw_only=True)
class Load:
    """A batch of blocks that is being read: the columns `[first, end)`."""

    first: int
    end: int
    future: Future[Loaded]


@dataclass(kw_only=True, eq=False)
class Watch:
    """A choice on its way.

    Attributes:
        plan: what was chosen, and why; None where restoring is no choice.
        tiers: where each block of the stretch lies.
        stop_token: where the stretch ends.
        begun: when, by `time.perf_counter`.
        alone: whether nobody else computed meanwhile.
    """

    plan: RestorePlan | None
    tiers: Sequence[str]
    stop_token: int
    begun: float
    alone: bool = True


@dataclass(kw_only=True, eq=False)
class Restore:
    """What a request still gets from lower tiers.

    Attributes:
        keys: of its blocks, up to the last one that comes from there.
        used: keys of its blocks up to the last one that a tier has, until that is told it.
        start_token: where its first one begins; those before it are computed.
        next: column of the first one that nobody reads yet.
        ready: column up to which they are in place.
        is_first: whether the request is here for the first time, so that what it gets counts.
        watch: how the choice turns out.
        is_over: whether nothing more is to come.
        loads: what is being read, in order.
    """

    keys: Sequence[bytes]
    used: Sequence[bytes]
    start_token: int
    next: int
    ready: int
    is_first: bool
    watch: Watch
    is_over: bool = False
    loads: deque[Load] = field(default_factory=deque)
