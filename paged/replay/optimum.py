"""The offline optimum: what a cache of a given size could hit if it knew the requests to come.

Belady's rule, evict what is used again the latest, needs no change for trees of prefixes. A
request that uses a block uses the blocks before it too, so a parent's next use is never later
than its child's. Among blocks with the same next use (all of them on one path, or never used
again) the deepest goes first. So the victim is always a leaf, and nothing is ever resident
without its parent.

No policy that has to hold all of a request's blocks while it runs hits more blocks. Blocks count
alike here, though a deep one saves more FLOPs than a shallow one: for saved FLOPs it is the
yardstick, not a proven bound.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from .trace import Trace


def optimum_hits(trace: Trace, capacity: int) -> np.ndarray:
    """Blocks that each request finds under Belady's rule.

    Args:
        trace: the requests.
        capacity: blocks that the cache holds; a request that asks for more is refused.

    Returns:
        `int32[R]`; 0 for a refused request, which changes nothing in the cache.
    """
    if capacity < 1:
        raise ValueError(f"{capacity=} must be at least 1 block")
    never = trace.num_requests
    next_uses = _next_uses(trace, capacity).tolist()
    symbols, offsets = trace.symbols.tolist(), trace.offsets.tolist()
    resident: dict[int, int] = {}  # the next use of every block in the cache
    # (-next use, -column, symbol): the victim on top. An entry counts only while it says what
    # `resident` says: a block that was used since has a newer entry.
    heap: list[tuple[int, int, int]] = []
    hits = np.zeros(never, np.int32)
    for request, (start, stop) in enumerate(pairwise(offsets)):
        size = stop - start
        if size > capacity:
            continue
        path = symbols[start:stop]
        found = sum(map(resident.__contains__, path))  # a prefix of it, see above
        hits[request] = found
        # The blocks of the path are never victims: their next use is now, before all others.
        excess = len(resident) + size - found - capacity
        while excess > 0:
            negative_use, _, victim = heapq.heappop(heap)
            if resident.get(victim) == -negative_use:
                del resident[victim]
                excess -= 1
        for column, symbol in enumerate(path):
            next_use = next_uses[start + column]
            resident[symbol] = next_use
            heapq.heappush(heap, (-next_use, -column, symbol))
    return hits


def unlimited_hits(trace: Trace) -> np.ndarray:
    """Blocks that each request finds in a cache that never evicts, `int32[R]`."""
    first = np.zeros(trace.symbols.shape[0], bool)
    first[np.unique(trace.symbols, return_index=True)[1]] = True
    seen = np.concatenate([np.zeros(1, np.int64), np.cumsum(~first)])
    return (seen[trace.offsets[1:]] - seen[trace.offsets[:-1]]).astype(np.int32)


def _next_uses(trace: Trace, capacity: int) -> np.ndarray:
    """The next request that asks for each entry of `symbols`, `int64[U]`; R if there is none.

    A request that will be refused uses nothing.
    """
    request = trace.request_of_block()
    used = np.flatnonzero((trace.num_blocks <= capacity)[request])
    order = used[np.argsort(trace.symbols[used], kind="stable")]
    next_uses = np.full(trace.symbols.shape[0], trace.num_requests, np.int64)
    again = trace.symbols[order[1:]] == trace.symbols[order[:-1]]
    next_uses[order[:-1][again]] = request[order[1:][again]]
    return next_uses
