"""Tiers below the device in a replay: which of a request's blocks they would have held, and where.

What the device holds does not depend on them: whatever becomes of a request, it ends with all its
blocks published. So they are replayed after it, from the blocks that each request found there.

`SimulatedTiers` is `octavo.paged.tiers.TierStack` without the bytes: the same blocks are in the
same tiers, in the same order of use. Blocks are symbols of the trace here, and time stands still
while one is stored, so that nothing is ever on its way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .trace import Trace


class SimulatedTiers:
    """LRU stores of symbols, the fastest first.

    Args:
        sizes: blocks that each holds; None is unlimited.
    """

    def __init__(self, sizes: Sequence[int | None]):
        self._sizes = tuple(sizes)
        # The least recently used first.
        self.tiers: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in sizes)

    def num_held(self, blocks: Sequence[int]) -> int:
        """How many of a sequence's blocks, from its first, are in some tier."""
        held = (any(block in tier for tier in self.tiers) for block in blocks)
        return next((i for i, there in enumerate(held) if not there), len(blocks))

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that these blocks, a sequence's first ones, were used."""
        for tier in self.tiers:
            for block in reversed(blocks):
                if block in tier:
                    tier.move_to_end(block)

    def load(self, blocks: Sequence[int]) -> list[int]:
        """The tier that each of these blocks is read from, up to the first that none has."""
        sources = []
        for block in blocks:
            level = next((i for i, tier in enumerate(self.tiers) if block in tier), None)
            if level is None:
                break
            for above in range(level):
                self._put(above, block)
            sources.append(level)
        return sources

    def save(self, blocks: Sequence[int]) -> None:
        """Store blocks that have become full together, in all tiers that lack them."""
        # Asked before any is stored: one that makes room for another is not stored again.
        missing = [b for b in blocks if any(b not in tier for tier in self.tiers)]
        for block in reversed(missing):
            for level in range(len(self.tiers)):
                self._put(level, block)

    def _put(self, level: int, block: int) -> None:
        tier, size = self.tiers[level], self._sizes[level]
        if block not in tier:
            if size is not None and len(tier) >= size:
                tier.popitem(last=False)
            tier[block] = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """N runs of blocks that follow one another in a request and come from the same tier.

    Those of a request follow one another from its first block that the device lacks.

    Attributes:
        request: `int64[N]` whose they are, ascending.
        level: `int64[N]` the tier, 0 for the fastest.
        num_blocks: `int64[N]`, at least 1.
    """

    request: np.ndarray
    level: np.ndarray
    num_blocks: np.ndarray


def tier_runs(
    trace: Trace,
    hits: np.ndarray,
    capacity: int,
    sizes: Sequence[int | None],
    *,
    chunk_size: int,
) -> Runs:
    """What tiers would have held of each request that the device did not.

    As in the engine, a tier holds full blocks only, and a prompt's last token is always computed.

    Args:
        trace: the requests.
        hits: `int32[R]` blocks that each request found on the device.
        capacity: blocks of the device; a request that asks for more is refused.
        sizes: of the tiers, see `SimulatedTiers`.
        chunk_size: tokens that are computed, and then saved, together.
    """
    tiers, size = SimulatedTiers(sizes), trace.tokens_per_block
    per_chunk = max(chunk_size // size, 1)
    symbols, offsets = trace.symbols.tolist(), trace.offsets.tolist()
    num_tokens, found = trace.num_tokens.tolist(), hits.tolist()
    runs: list[tuple[int, int, int]] = []
    for request, tokens in enumerate(num_tokens):
        path = symbols[offsets[request] : offsets[request + 1]]
        if len(path) > capacity:
            continue
        most = (tokens - 1) // size  # that may come from anywhere
        first = min(found[request], most)
        held = tiers.num_held(path[first:most])
        tiers.touch(path[: first + held])
        for level in tiers.load(path[first : first + held]):
            if runs and runs[-1][:2] == (request, level):
                runs[-1] = (request, level, runs[-1][2] + 1)
            else:
                runs.append((request, level, 1))
        full = tokens // size
        for start in range(first, full, per_chunk):
            tiers.save(path[start : min(start + per_chunk, full)])
    columns = np.array(runs, np.int64).reshape(-1, 3)
    return Runs(request=columns[:, 0], level=columns[:, 1], num_blocks=columns[:, 2])
