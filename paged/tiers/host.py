"""Blocks in host memory: one array of slots, given to the most recently used keys.

The array is made at once and never grows, and its pages are taken from the system as they are first
written. So the budget is kept exactly, whatever comes and goes. A device that shares this memory
copies blocks from where they lie: for that they are lent.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from .memory import aligned_empty
from .pins import TierPins
from .tier import TierStats


class HostTier:
    """A `Tier` of host memory.

    Args:
        budget_bytes: for keys' and values' bytes.
        block_bytes: bytes of a block.
        block_size: tokens of a block, B.

    Attributes:
        payloads: `uint8[n, block_bytes]`, the blocks in their slots.
        max_lent: blocks that are lent at a time at most.

    Raises:
        ValueError: the budget holds no block.
    """

    name = "host"

    def __init__(self, *, budget_bytes: int, block_bytes: int, block_size: int):
        num_slots = budget_bytes // block_bytes
        if num_slots < 1:
            raise ValueError(f"{budget_bytes=} holds no block of {block_bytes=}: give it more")
        self.payloads = aligned_empty((num_slots, block_bytes), np.uint8)
        self._tokens = np.empty((num_slots, block_size), np.int32)
        # The least recently used first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots))[::-1]
        self.pins = TierPins(num_slots // 2)
        self.max_lent = num_slots // 4
        self._lent = np.zeros(num_slots, np.int32)  # times
        self._num_lent = 0
        self._orphans: set[int] = set()  # slots that are lent, and otherwise free
        # Held while a slot is copied, so that nobody takes it meanwhile.
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """See `Tier`."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._take_slot()
                self.payloads[slot], self._tokens[slot] = payload, tokens
                self._slots[key] = slot
            self._slots.move_to_end(key)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._evictions += 1
        # At most half are pinned and a quarter lent.
        while (oldest := next(iter(self._slots))) in self.pins or self._lent[self._slots[oldest]]:
            self._slots.move_to_end(oldest)
        return self._slots.pop(oldest)

    def look_up(self, keys: Sequence[bytes]) -> None:
        """See `Tier`: it always knows."""

    def read(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> int:
        """See `Tier`; all in one copy."""
        with self._lock:
            slots = self._find(keys, tokens)
            if slots:
                np.take(self.payloads, slots, axis=0, out=out[: len(slots)], mode="clip")
            return len(slots)

    def can_lend(self, num_blocks: int) -> bool:
        """Whether so many more blocks may be lent now."""
        return self._num_lent + num_blocks <= self.max_lent

    def lend(self, keys: Sequence[bytes], tokens: np.ndarray) -> list[int]:
        """Slots of a sequence's blocks until one is missing; they stay as they are for now.

        Nothing is lent if that were more than `max_lent` blocks.

        Args:
            keys: n of them.
            tokens: `int32[n, B]`.
        """
        with self._lock:
            if not self.can_lend(len(keys)):
                return []
            slots = self._find(keys, tokens)
            self._lent[slots] += 1
            self._num_lent += len(slots)
            return slots

    def take_back(self, slots: Sequence[int]) -> None:
        """What was lent need not stay any more."""
        with self._lock:
            self._lent[slots] -= 1
            self._num_lent -= len(slots)
            for slot in self._orphans.intersection(slots):
                if not self._lent[slot]:
                    self._orphans.remove(slot)
                    self._free.append(slot)

    def _find(self, keys: Sequence[bytes], tokens: np.ndarray) -> list[int]:
        """Slots of a sequence's blocks until one is missing, which is counted."""
        slots = [self._slots[key] for key in takewhile(self._slots.__contains__, keys)]
        differ = self._tokens[slots] != tokens[: len(slots)]
        slots = slots[: int(differ.any(axis=1).argmax())] if differ.any() else slots
        self._hits += len(slots)
        self._misses += len(slots) < len(keys)
        return slots

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        with self._lock:
            for key in reversed(keys):
                if key in self._slots:
                    self._slots.move_to_end(key)

    def flush(self) -> None:
        """See `Tier`: nothing is ever on its way."""

    def clear(self, *, keep_pinned: bool = False) -> None:
        """See `Tier`."""
        with self._lock:
            if not keep_pinned:
                self.pins.clear()
            for key in [key for key in self._slots if key not in self.pins]:
                slot = self._slots.pop(key)
                if self._lent[slot]:
                    self._orphans.add(slot)
                else:
                    self._free.append(slot)

    def close(self) -> None:
        """See `Tier`: it ends with the process."""

    def stats(self) -> TierStats:
        """See `Tier`."""
        with self._lock:
            num_slots, block_bytes = self.payloads.shape
            return TierStats(
                num_blocks=len(self._slots),
                num_bytes=len(self._slots) * block_bytes,
                budget_bytes=num_slots * block_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                pinned=len(self.pins),
            )
