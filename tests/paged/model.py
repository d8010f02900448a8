"""The block manager in plain Python: what every operation must mean."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from octavo.paged import BlockTables, CacheState

Key = tuple[int, tuple[int, ...]]  # namespace, all tokens from the start of the sequence


@dataclass
class Model:
    num_blocks: int
    block_size: int
    blocks_per_seq: int
    cached: dict[Key, int] = field(default_factory=dict)  # every indexed prefix -> last access
    seqs: dict[int, list[Key | int]] = field(default_factory=dict)  # an int is a private block
    clock: int = 0
    _private: itertools.count = field(default_factory=itertools.count)

    def held(self) -> set[Key | int]:
        return {entry for seq in self.seqs.values() for entry in seq}

    @property
    def num_active(self) -> int:
        return len(self.held())

    @property
    def num_cached(self) -> int:
        return len(self.cached.keys() - self.held())

    @property
    def num_free(self) -> int:
        return self.num_blocks - 1 - self.num_active - self.num_cached

    def match(self, tokens: list[int], limit: int, namespace: int) -> list[Key]:
        size, path = self.block_size, []
        for i in range(1, limit + 1):
            key = (namespace, tuple(tokens[: i * size]))
            if key not in self.cached:
                break
            path.append(key)
        return path

    def touch(self, path: list[Key]) -> None:
        for key in reversed(path):
            self.clock += 1
            self.cached[key] = self.clock

    def _make_room(self, count: int, spare: set[Key]) -> bool:
        short = count - self.num_free
        victims = sorted(self.cached.keys() - self.held() - spare, key=self.cached.__getitem__)
        if short > len(victims):
            return False
        for key in victims[: max(short, 0)]:
            assert not any(
                k[0] == key[0] and k != key and k[1][: len(key[1])] == key[1] for k in self.cached
            ), "evicted a parent before its child"
            del self.cached[key]
        return True

    def admit(self, seat: int, tokens: list[int], namespace: int) -> tuple[bool, int]:
        needed = -(-len(tokens) // self.block_size)
        if seat in self.seqs or needed > self.blocks_per_seq or not tokens:
            return False, 0
        path = self.match(tokens, (len(tokens) - 1) // self.block_size, namespace)
        # Blocks found in the cache stop being free for the taking before room is made.
        already = len(self.held() | set(path)) + len(self.cached.keys() - self.held() - set(path))
        room = needed - len(path)
        free = self.num_blocks - 1 - already
        if room > free and not self._make_room(room, set(path)):
            return False, 0
        self.touch(path)
        self.seqs[seat] = [*path, *(next(self._private) for _ in range(room))]
        return True, len(path)

    def append(self, lens: dict[int, int], max_new: int) -> bool:
        grow = {}
        for seat, num_tokens in lens.items():
            have = len(self.seqs.get(seat, []))
            target = max(have, -(-num_tokens // self.block_size))
            if target > self.blocks_per_seq or target - have > max_new:
                return False
            grow[seat] = target - have
        if not self._make_room(sum(grow.values()), set()):
            return False
        for seat, count in grow.items():
            if count:
                self.seqs.setdefault(seat, []).extend(next(self._private) for _ in range(count))
        return True

    def publish(self, seat: int, column: int, tokens: list[int], namespace: int) -> bool:
        """`tokens` are the sequence's tokens up to the end of the block."""
        seq = self.seqs.get(seat, [])
        if not 0 <= column < len(seq) or (column and isinstance(seq[column - 1], int)):
            return False
        key = (namespace, tuple(tokens))
        if isinstance(seq[column], int):
            if key not in self.cached:
                self.clock += 1
                self.cached[key] = self.clock
            seq[column] = key
        return True

    def release(self, seat: int) -> bool:
        if not self.seqs.get(seat):
            return False
        path = [key for key in self.seqs.pop(seat) if not isinstance(key, int)]
        self.touch(path)
        return True


def prefixes(state: CacheState) -> dict[int, Key]:
    """The prefix that each indexed block of a real state stands for."""
    index = state.index
    parent, tokens = np.asarray(index.parent), np.asarray(index.tokens)
    namespace = np.asarray(index.namespace)

    def path(block: int) -> tuple[int, ...]:
        before = path(int(parent[block])) if parent[block] else ()
        return before + tuple(int(t) for t in tokens[block])

    blocks = np.flatnonzero(np.asarray(index.indexed))
    return {int(b): (int(namespace[b]), path(int(b))) for b in blocks}


def assert_same(model: Model, state: CacheState, tables: BlockTables) -> None:
    """Full equality of meaning: what is cached, in which order it would go, who holds what."""
    names = prefixes(state)
    assert set(names.values()) == set(model.cached)
    last = np.asarray(state.index.last_access)
    refs = np.asarray(state.pool.ref_count)
    # Only among blocks that could be evicted does the order carry meaning.
    idle = [b for b in names if not refs[b]]
    real_order = sorted(idle, key=lambda b: last[b])
    held = model.held()
    want_order = sorted((k for k in model.cached if k not in held), key=model.cached.__getitem__)
    assert [names[b] for b in real_order] == want_order
    ids, lens = np.asarray(tables.block_ids), np.asarray(tables.num_blocks)
    for seat in range(len(lens)):
        seq = model.seqs.get(seat, [])
        assert lens[seat] == len(seq)
        for block, entry in zip(ids[seat], seq, strict=False):
            assert names.get(int(block)) == (None if isinstance(entry, int) else entry)
    assert int(state.pool.num_free) == model.num_free
