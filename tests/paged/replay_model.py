"""For the tests of the replay: traces made up here, and caches in plain Python to compare with."""

from collections import OrderedDict
from itertools import combinations

import numpy as np

from octavo.paged.replay import Trace, TraceBuilder


def make_trace(*requests, tokens_per_block=4):
    """A trace of requests given as what their blocks are called, full blocks all."""
    builder = TraceBuilder(tokens_per_block=tokens_per_block)
    for blocks in requests:
        builder.add(blocks, num_tokens=max(len(blocks), 1) * tokens_per_block)
    return builder.build()


def conversations(seed, *, num_users=12, num_turns=120, max_blocks=24):
    """A trace of users in turn: a system prompt in common, dialogues that grow and start anew."""
    rng = np.random.default_rng(seed)
    system = [f"system {i}" for i in range(3)]
    dialogues = [list(system) for _ in range(num_users)]
    requests = []
    for turn in range(num_turns):
        user = int(rng.zipf(1.5)) % num_users
        if len(dialogues[user]) > max_blocks - 4 or rng.random() < 0.1:
            dialogues[user] = list(system)
        dialogues[user] += [f"turn {turn}, {i}" for i in range(rng.integers(1, 5))]
        requests.append(list(dialogues[user]))
    return make_trace(*requests)


def lru_hits(trace: Trace, capacity: int) -> np.ndarray:
    """Blocks that each request finds with LRU, deepest first where accesses are equally old."""
    cache: OrderedDict[int, None] = OrderedDict()  # the victim first
    hits = []
    for request in range(trace.num_requests):
        path = trace.blocks(request).tolist()
        found = 0
        while len(path) <= capacity and found < len(path) and path[found] in cache:
            found += 1
        hits.append(found)
        if len(path) > capacity:
            continue
        for symbol in path[:found]:
            cache.move_to_end(symbol)
        while len(cache) + len(path) - found > capacity:
            cache.popitem(last=False)
        for symbol in reversed(path):
            cache[symbol] = None
            cache.move_to_end(symbol)
    return np.array(hits, np.int32)


def most_hits(trace: Trace, capacity: int) -> int:
    """The most blocks that any choice of victims can hit, by trying all of them.

    Whatever is kept must hold every kept block's parent: a request finds a prefix only.
    """
    paths = [tuple(trace.blocks(r).tolist()) for r in range(trace.num_requests)]
    parents = {path[i]: path[i - 1] for path in paths for i in range(1, len(path))}
    outcomes = {frozenset(): 0}  # hits so far, by what is resident
    for path in paths:
        if len(path) > capacity:
            continue
        after: dict[frozenset[int], int] = {}
        for resident, hits in outcomes.items():
            found = len(resident & set(path))
            others = sorted(resident - set(path))
            room = min(capacity - len(path), len(others))
            for kept in combinations(others, room):
                now = frozenset(kept) | frozenset(path)
                if all(parents.get(symbol, symbol) in now for symbol in now):
                    after[now] = max(after.get(now, 0), hits + found)
        outcomes = after
    return max(outcomes.values())
