"""Sequences whose blocks a tier keeps, whatever else it makes room for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence


class TierPins:
    """The pins of one tier: each of a sequence's first blocks, until a time.

    One thread pins and unpins, any number may ask.

    Args:
        max_blocks: pinned at once, at most.
    """

    def __init__(self, max_blocks: int):
        self.max_blocks = max_blocks
        # Keys of each pinned sequence, and until when, by its last key.
        self._pins: dict[bytes, tuple[Sequence[bytes], float]] = {}
        self._until: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is pinned now."""
        until = self._until.get(key)
        return until is not None and until > time.monotonic()

    def __len__(self) -> int:
        """How many blocks are pinned now."""
        now = time.monotonic()
        return sum(until > now for until in self._until.values())

    def pin(self, keys: Sequence[bytes], until: float = math.inf) -> bool:
        """Pin a sequence's first blocks; False, and no change, if they are too many.

        Args:
            keys: of at least one block.
            until: time at which the pin ends, of `time.monotonic`; a later end stays.
        """
        until = max(until, self._pins.get(keys[-1], ((), -math.inf))[1])
        return self._change(self._pins | {keys[-1]: (keys, until)})

    def unpin(self, keys: Sequence[bytes]) -> None:
        """End the pins of these sequences; blocks under which others are pinned stay pinned."""
        ended = set(keys)
        self._change({last: pin for last, pin in self._pins.items() if last not in ended})

    def clear(self) -> None:
        """End all pins."""
        self._change({})

    def _change(self, pins: dict[bytes, tuple[Sequence[bytes], float]]) -> bool:
        now = time.monotonic()
        pins = {last: pin for last, pin in pins.items() if pin[1] > now}
        until: dict[bytes, float] = {}
        for keys, end in pins.values():
            for key in keys:
                until[key] = max(end, until.get(key, end))
        if len(until) > self.max_blocks:
            return False
        self._pins, self._until = pins, until
        return True
