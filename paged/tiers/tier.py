"""What a tier is: a store of blocks by key, with a budget, that may forget but never errs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .pins import TierPins


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """A tier in numbers.

    Attributes:
        num_blocks, num_bytes: what it holds now, as far as is known here.
        budget_bytes: what it may hold; 0 where that is not decided here.
        hits: blocks read.
        misses: blocks that were asked for, and were not there or not right.
        evictions: blocks that made room for others.
        drops: blocks that it had no time to take.
        errors: blocks that could not be read or written, or were not right.
        pinned: blocks that it does not evict.
    """

    num_blocks: int
    num_bytes: int
    budget_bytes: int
    hits: int
    misses: int
    evictions: int
    drops: int = 0
    errors: int = 0
    pinned: int = 0


class Tier(Protocol):
    """A store of blocks, for any number of threads.

    A key is all that names a block; its tokens `int32[B]` are compared as well. What cannot be
    read is a miss, what cannot be stored is forgotten: both are counted, neither raises.
    """

    @property
    def name(self) -> str:
        """For people and metrics."""
        ...

    @property
    def pins(self) -> TierPins:
        """What it does not evict."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is there, or about to be, as far as is known here; nothing is counted."""
        ...

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Learn which of a sequence's blocks, from its first until one is missing, are there.

        It may ask somebody else, and then for a fraction of a second at most.
        """
        ...

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """Take a copy of a block's `payload: uint8[block_bytes]`, now or soon."""
        ...

    def read(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> int:
        """Read a sequence's blocks until one is missing; returns how many were read.

        It is no use: `touch` says so of a whole sequence, in the order in which blocks are to go.

        Args:
            keys: n of them.
            tokens: `int32[n, B]`.
            out: `uint8[n, block_bytes]`; after what was read it may hold anything.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a sequence of blocks, from its start, was used: its last block goes first."""
        ...

    def flush(self) -> None:
        """Wait until all that was put is stored."""
        ...

    def clear(self, *, keep_pinned: bool = False) -> None:
        """Forget everything, pins and what they keep included if they are not to stay."""
        ...

    def close(self) -> None:
        """Store what was put and stop; afterwards nothing is taken."""
        ...

    def stats(self) -> TierStats:
        """Where it stands."""
        ...


def read_run(
    read_fn: Callable[[bytes, np.ndarray, np.ndarray], bool],
    keys: Sequence[bytes],
    tokens: np.ndarray,
    out: np.ndarray,
) -> int:
    """`Tier.read` for tiers that read one block after the other."""
    for i, key in enumerate(keys):
        if not read_fn(key, tokens[i], out[i]):
            return i
    return len(keys)
