"""What a request is still to get from a tier below the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

Loaded = tuple[np.ndarray, list[str]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """A batch of blocks that is being read: the columns `[first, end)`."""

    first: int
    end: int
    future: Future[Loaded]


@dataclass(kw_only=True, eq=False)
class Restore:
    """What a request still gets from lower tiers.

    Attributes:
        keys: of its blocks, up to the last one that was found.
        next: column of the first one that nobody reads yet.
        is_first: whether the request is here for the first time, so that what it gets counts.
        loads: what is being read, in order.
    """

    keys: Sequence[bytes]
    next: int
    is_first: bool
    loads: deque[Load] = field(default_factory=deque)
