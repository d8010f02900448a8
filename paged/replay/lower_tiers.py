"""Tiers below the device in a replay: what they would have held of each request, and saved it.

What the device holds does not depend on them: whatever becomes of a request, it ends with all its
blocks published. So they are replayed after it, from the blocks that each request found there.
(With one exception: an engine with tiers lets its policy `cost` count no block as more than what
restoring one takes. The replayed device knows of no tiers.)

`SimulatedTiers` is `octavo.paged.tiers.TierStack` without the bytes: the same blocks are in the
same tiers, in the same order of use. Blocks are symbols of the trace here, and time stands still
while one is stored, so that nothing is ever on its way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_model import CostModel, plan_restore
from .trace import Trace


class SimulatedTiers:
    """LRU stores of symbols, the fastest first.

    Args:
        sizes: blocks that each holds, by name; None is unlimited.
    """

    def __init__(self, sizes: Mapping[str, int | None]):
        self._sizes = dict(sizes)
        # The least recently used first.
        self.tiers: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in sizes}

    def nearest(self, blocks: Sequence[int]) -> list[str]:
        """The nearest tier of each of a sequence's blocks, from its first up to where none is."""
        names = []
        for block in blocks:
            name = next((name for name, tier in self.tiers.items() if block in tier), None)
            if name is None:
                break
            names.append(name)
        return names

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that these blocks, a sequence's first ones, were used."""
        for tier in self.tiers.values():
            for block in reversed(blocks):
                if block in tier:
                    tier.move_to_end(block)

    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks, each from the nearest tier, and keep them in those that are nearer."""
        for block in blocks:
            for name, tier in self.tiers.items():
                if block in tier:
                    break
                self._put(name, block)

    def save(self, blocks: Sequence[int]) -> None:
        """Store blocks that have become full together, in all tiers that lack them."""
        # Asked before any is stored: one that makes room for another is not stored again.
        missing = [b for b in blocks if any(b not in tier for tier in self.tiers.values())]
        for block in reversed(missing):
            for name in self.tiers:
                self._put(name, block)

    def _put(self, name: str, block: int) -> None:
        tier, size = self.tiers[name], self._sizes[name]
        if block not in tier:
            if size is not None and len(tier) >= size:
                tier.popitem(last=False)
            tier[block] = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Below:
    """What tiers below the device made of a trace.

    Attributes:
        seconds: `float64[R]` predicted for each request's prompt, restoring included.
        num_found: blocks that each tier had and neither the device nor a faster one.
        num_restored: those of them that were got back.
    """

    seconds: np.ndarray
    num_found: Counter[str]
    num_restored: Counter[str]


def replay_below(
    trace: Trace,
    hits: np.ndarray,
    capacity: int,
    sizes: Mapping[str, int | None],
    costs: CostModel,
) -> Below:
    """Replay a trace through tiers below a device.

    As in the engine, a tier holds full blocks only, a prompt's last token is always computed, and
    what is found is restored as far as that is sooner than computing it.

    Args:
        trace: the requests.
        hits: `int32[R]` blocks that each request found on the device.
        capacity: blocks of the device; a request that asks for more is refused.
        sizes: of the tiers, see `SimulatedTiers`.
        costs: whose seconds to predict; a chunk's blocks are saved together.
    """
    size, tiers = trace.tokens_per_block, SimulatedTiers(sizes)
    per_chunk = max(costs.chunk_size // size, 1)
    stop = trace.num_tokens.astype(np.float64)
    alone = costs.seconds_to_recompute(np.minimum(hits * float(size), stop - 1), stop)
    below = Below(seconds=np.array(alone), num_found=Counter(), num_restored=Counter())
    symbols, offsets = trace.symbols.tolist(), trace.offsets.tolist()
    on_device = hits.tolist()
    for request, num_tokens in enumerate(trace.num_tokens.tolist()):
        path = symbols[offsets[request] : offsets[request + 1]]
        if len(path) > capacity:
            continue
        most = (num_tokens - 1) // size  # that may come from anywhere
        first = min(on_device[request], most)
        found = tiers.nearest(path[first:most])
        tiers.touch(path[: first + len(found)])
        if found:
            below.num_found.update(found)
            end = (first + len(found)) * size
            plan = plan_restore(costs, first * size, size, found)
            seconds = plan.seconds + float(costs.seconds_to_recompute(end, num_tokens))
            # Of a chunk that is computed anyway, tokens more can cost nothing.
            if seconds < below.seconds[request]:
                below.seconds[request] = seconds
                below.num_restored.update(found[plan.start : plan.stop])
                tiers.load(path[first + plan.start : first + plan.stop])
        full = num_tokens // size
        for start in range(first, full, per_chunk):
            tiers.save(path[start : min(start + per_chunk, full)])
    return below
