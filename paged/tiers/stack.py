"""Several tiers as one, the fastest first, and the thread that brings blocks down to them.

Blocks are saved when they become full and are found by others, not when they are evicted. Eviction
happens inside jitted allocation, so to save its victims first the host would have to know them
before, or wait for each allocation and read them back; and then a restart would lose all that was
still on the device, which is what is worth most. Saving early costs one copy of each new block,
which waits for nothing, and it costs room: what is on the device is below it too, so a tier is
worth having when it is larger than the device's cache.

Lifetimes: packed blocks wait on the device for the thread, `_MAX_SAVES` batches of them at most;
then whoever saves waits, which takes as long as copying one batch in memory.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import Any

import numpy as np

from .tier import Tier, TierStats

logger = logging.getLogger(__name__)

_MAX_SAVES = 4


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Blocks on their way down: `packed` has at least one row for each key."""

    keys: Sequence[bytes]
    tokens: np.ndarray
    packed: Any


class TierStack:
    """The tiers below a device; one thread saves and looks up, any number loads.

    Args:
        tiers: the fastest first.
        block_bytes: bytes of a block.
    """

    def __init__(self, tiers: Sequence[Tier], block_bytes: int):
        self.tiers = tuple(tiers)
        self.block_bytes = block_bytes
        self._saves: queue.Queue[_Batch | None] = queue.Queue(_MAX_SAVES)
        # Keys in `_saves`.
        self._coming: set[bytes] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def missing(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which blocks a tier lacks, and are not on their way."""
        # In this order: what has come is stored before it is no longer coming.
        others = [key for key in keys if key not in self._coming]
        return {key for tier in self.tiers for key in others if key not in tier}

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of a sequence's blocks, from its first, are in some tier."""
        return len(self.nearest(keys))

    def nearest(self, keys: Sequence[bytes]) -> list[str]:
        """The nearest tier of each of a sequence's blocks, from its first up to where none is."""
        names = self._nearest_stored(keys)
        if len(names) < len(keys) and keys[len(names)] in self._coming:
            self._saves.join()
            names += self._nearest_stored(keys[len(names) :])
        return names

    def _nearest_stored(self, keys: Sequence[bytes]) -> list[str]:
        names = [""] * len(keys)
        left: Sequence[int] = range(len(keys))  # those that no tier so far has
        for tier in self.tiers:
            if left:
                lacking = keys if len(left) == len(keys) else [keys[i] for i in left]
                tier.look_up(lacking)
                held = list(map(tier.__contains__, lacking))
                if all(held) and lacking is keys:
                    return [tier.name] * len(keys)
                for i in compress(left, held):
                    names[i] = tier.name
                left = [i for i in left if not names[i]]
        return list(takewhile(bool, names))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks, a sequence's first ones, were used."""
        for tier in self.tiers:
            tier.touch(keys)

    def save(self, keys: Sequence[bytes], tokens: np.ndarray, packed: Any) -> None:
        """Store blocks in all tiers, soon.

        Args:
            keys: n of them.
            tokens: `int32[n, B]`.
            packed: an array, on a device or not, whose first n rows are the blocks.
        """
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octavo-tiers", daemon=True)
            self._thread.start()
        self._coming.update(keys)
        try:
            self._saves.put(_Batch(keys=keys, tokens=tokens, packed=packed))
        except BaseException:  # an interrupt while it waited
            self._coming.difference_update(keys)
            raise

    def load(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> list[str]:
        """Read a sequence's blocks until one is missing; the tier's name for each that was read.

        Args:
            keys: n of them.
            tokens: `int32[n, B]`.
            out: `uint8[n, block_bytes]`, filled as far as blocks were read.
        """
        sources: list[str] = []
        while len(sources) < len(keys):
            at = len(sources)
            run = self._load_run(keys[at:], tokens[at:], out[at:])
            if not run:
                break
            sources += run
        return sources

    def _load_run(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> list[str]:
        """Read as many blocks from the first as one tier has and no faster one."""
        for level, tier in enumerate(self.tiers):
            faster = self.tiers[:level]
            run = []
            for key in keys:
                if key not in tier or any(key in other for other in faster):
                    break
                run.append(key)
            count = tier.read(run, tokens, out) if run else 0
            for i in range(count):
                for other in faster:
                    other.put(keys[i], tokens[i], out[i])
            if count:
                return [tier.name] * count
        return []

    def flush(self) -> None:
        """Wait until everything that was saved is stored."""
        self._saves.join()
        for tier in self.tiers:
            tier.flush()

    def pin(self, keys: Sequence[bytes], until: float) -> int:
        """Pin what is held of a sequence where there is most room; returns how many blocks.

        Args:
            keys: of the sequence's blocks, from its first.
            until: see `TierPins.pin`.
        """
        roomiest = max(self.tiers, key=lambda tier: tier.pins.max_blocks)
        self._saves.join()
        roomiest.look_up(keys)
        held = next((i for i, key in enumerate(keys) if key not in roomiest), len(keys))
        return held if held and roomiest.pins.pin(keys[:held], until) else 0

    def unpin(self, keys: Sequence[bytes]) -> None:
        """End the pins of a sequence's blocks, but for those under which others are pinned."""
        for tier in self.tiers:
            tier.pins.unpin(keys)

    def clear(self, names: Sequence[str], *, keep_pinned: bool = False) -> None:
        """Forget what the tiers of these names hold."""
        self._saves.join()
        for tier in self.tiers:
            if tier.name in names:
                tier.clear(keep_pinned=keep_pinned)

    def close(self) -> None:
        """Store what was saved, and stop all threads; afterwards nothing is saved."""
        if self._closed:
            return
        self._closed = True
        # The garbage collector may call from anywhere.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._saves.put(None)
            self._thread.join()
        for tier in self.tiers:
            tier.close()

    def stats(self) -> dict[str, TierStats]:
        """Each tier in numbers, by name."""
        return {tier.name: tier.stats() for tier in self.tiers}

    def _run(self) -> None:
        while True:
            batch = self._saves.get()
            try:
                if batch is None:
                    return
                self._store(batch)
            except Exception:  # whatever a device does: the thread must live on
                logger.exception("%d blocks could not be saved", len(batch.keys) if batch else 0)
            finally:
                if batch is not None:
                    self._coming.difference_update(batch.keys)
                self._saves.task_done()
                del batch  # the device's memory with it

    def _store(self, batch: _Batch) -> None:
        packed = np.ascontiguousarray(np.asarray(batch.packed))
        rows = packed.reshape(len(packed), -1).view(np.uint8)
        # The last first: a sequence is of use only from its start, so that is to stay longest.
        for i in reversed(range(len(batch.keys))):
            for tier in self.tiers:
                if batch.keys[i] not in tier:
                    tier.put(batch.keys[i], batch.tokens[i], rows[i])
