"""Host memory's blocks, copied by a device that shares this memory from where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..paged.tiers import HostTier, TierStack
from .staging import Staging


class Lender:
    """Lends a host tier's blocks for as long as the device copies them.

    Args:
        tier: whose they are.
        memory: `[m, L, K, B, ROW]`, its slots.

    Attributes:
        memory: the same.
    """

    def __init__(self, tier: HostTier, memory: np.ndarray):
        self._tier = tier
        self.memory = memory
        # Results of the programs that copy, and slots from which they do.
        self._copying: deque[tuple[jax.Array, list[int]]] = deque()

    @classmethod
    def of(
        cls, stack: TierStack, staging: Staging, dtype: Any, block_shape: tuple[int, ...]
    ) -> Lender | None:
        """That of the nearest tier, if the device can read where that keeps its blocks."""
        tier = stack.tiers[0]
        if not staging.is_host or not isinstance(tier, HostTier):
            return None
        return cls(tier, tier.payloads.view(dtype).reshape(-1, *block_shape))

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether these blocks, as far as is known, are all here and can be lent."""
        return len(keys) <= self._tier.max_lent and all(map(self._tier.__contains__, keys))

    def lend(
        self, keys: Sequence[bytes], tokens: np.ndarray, copy_fn: Callable[[list[int]], jax.Array]
    ) -> int:
        """Have a sequence's blocks copied until one is missing; returns how many.

        Args:
            keys: n of them.
            tokens: `int32[n, B]`.
            copy_fn: copies from slots of `memory`; its result is there when it has.
        """
        while self._copying and not self._tier.can_lend(len(keys)):
            self._take_back()
        slots = self._tier.lend(keys, tokens)
        if slots:
            try:
                self._copying.append((copy_fn(slots), slots))
            except BaseException:
                self._tier.take_back(slots)
                raise
        return len(slots)

    def settle(self) -> None:
        """Wait for all copies."""
        while self._copying:
            self._take_back()

    def _take_back(self) -> None:
        copied, slots = self._copying.popleft()
        try:
            copied.block_until_ready()
        finally:
            self._tier.take_back(slots)
