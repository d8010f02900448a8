"""The block manager in plain Python: what every operation must mean.

Blocks are objects, what they are found by is the namespace with all tokens from the start of the
sequence, the index is a dictionary. There are no ids, hashes, lists or links.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Key = tuple[int, tuple[int, ...]]  # namespace, all tokens from the start of the sequence


class Record(NamedTuple):
    """An eviction: when, for whom, and how the block was used before."""

    time: int
    owner: int
    uses: float
    last_use: int


@dataclass(eq=False)
class Block:
    """A block that is not free; `key` is None while nobody can find it."""

    key: Key | None = None
    last: int = 0
    hits: int = 0
    uses: float = 0.0
    last_use: int = 0
    worth: float = 0.0
    priority: int = 0
    pin_until: int = 0

    def forget(self) -> None:
        self.key, self.last, self.hits, self.last_use = None, 0, 0, 0
        self.uses, self.worth, self.priority, self.pin_until = 0.0, 0.0, 0, 0


@dataclass
class Seq:
    """A running sequence: what its caller knows of it, and its blocks."""

    blocks: list[Block]
    namespace: int
    tokens: list[int]
    written: int = 0  # tokens whose keys and values are in the cache
    priority: int = 0


@dataclass
class Entry:
    """A block to publish; `tokens` are all of the sequence's, up to the last that counts."""

    seat: int
    column: int
    num_tokens: int
    tokens: tuple[int, ...]
    namespace: int


@dataclass
class Model:
    num_blocks: int
    block_size: int
    num_seats: int
    blocks_per_seq: int
    policy: str = "lru"
    slope: float = 0.0
    most: float = math.inf
    protected: int = 0
    pin_budget: int = 0
    now: int = 0
    owner: int = 0
    queries: int = 0
    hits: int = 0
    requests: int = 0
    interval: float = 400.0
    cached: dict[Key, Block] = field(default_factory=dict)  # every block that can be found
    seqs: dict[int, Seq] = field(default_factory=dict)
    evicted: dict[Key, Record] = field(default_factory=dict)  # when it was last
    new: set[Key] = field(default_factory=set)  # indexed since they were last looked at
    _clock: int = 0

    # What is where.

    def refs(self) -> Counter[Block]:
        return Counter(block for seq in self.seqs.values() for block in seq.blocks)

    @property
    def num_active(self) -> int:
        return len(self.refs())

    @property
    def num_cached(self) -> int:
        return len(set(self.cached.values()) - set(self.refs()))

    @property
    def num_free(self) -> int:
        return self.num_blocks - 1 - self.num_active - self.num_cached

    @property
    def num_pinned(self) -> int:
        return sum(block.pin_until > self.now for block in self.cached.values())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-max(num_tokens, 0) // self.block_size)

    def match(self, tokens: Sequence[int], limit: int, namespace: int) -> list[Block]:
        """The longest cached prefix of at most `limit` full blocks."""
        path: list[Block] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.cached.get((namespace, tuple(tokens[:end])))
            if block is None or len(path) >= limit:
                break
            path.append(block)
        return path

    def children(self, prefix: tuple[int, ...], namespace: int) -> list[Block]:
        """All blocks that go on from a prefix of full blocks, full or not."""
        start, end = len(prefix), len(prefix) + self.block_size
        return [
            block
            for (ns, tokens), block in self.cached.items()
            if ns == namespace and start < len(tokens) <= end and tokens[:start] == prefix
        ]

    def _is_used(self, seat: int) -> bool:
        return seat in self.seqs

    def _is_empty(self, seat: int) -> bool:
        return 0 <= seat < self.num_seats and seat not in self.seqs

    # Use and eviction.

    def touch(
        self, paths: Sequence[Sequence[Block]], *, hit: bool = False, priority: Sequence[int] = (0,)
    ) -> None:
        found = [[block for block in path if block.key] for path in paths]
        second_uses: list[int] = []
        for path, level in zip(found, priority, strict=True):
            for block in path:
                age = self.requests - block.last_use
                if hit:
                    second_uses += [age] if block.uses == 0 else []
                    block.uses = self.aged(block.uses, age) + 1
                block.hits += hit
                block.priority = max(block.priority, level)
            worth = 0.0
            for depth, block in reversed(list(enumerate(path))):
                value = (block.uses + 1) * math.sqrt(min(1 + self.slope * depth, self.most))
                worth = block.worth = max(worth, value, block.worth)
        for path in reversed(found):
            for block in reversed(path):
                block.last, block.last_use = self._tick(), self.requests
        pull = sum((age > self.interval) - (age < self.interval) for age in second_uses)
        factor = math.exp(0.01 * math.copysign(math.sqrt(abs(pull)), pull))
        self.interval = min(max(self.interval * factor, 1.0), 1e6)

    def aged(self, uses: float, age: int) -> float:
        return uses * 2 ** (-age / (16 * self.interval))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def eviction_order(self, spare: Sequence[Block] = ()) -> list[Block]:
        """All blocks that may be evicted, the first to go first."""
        once_hit = sorted((b for b in self.cached.values() if b.hits), key=lambda b: -b.last)
        protected = set(once_hit[: self.protected])
        scores: dict[str, Callable[[Block], float]] = {
            "lru": lambda block: 0,
            "lfu": lambda block: block.hits,
            "slru": lambda block: block in protected,
            "cost": self._value_now,
        }
        score, refs = scores[self.policy], self.refs()
        may_go = (
            block
            for block in self.cached.values()
            if not refs[block] and block.pin_until <= self.now and block not in spare
        )
        return sorted(may_go, key=lambda block: (block.priority, score(block), block.last))

    def _value_now(self, block: Block) -> float:
        # In the floats of the real one: an order by values that nearly tie depends on them.
        age = np.float32(max(self.requests - block.last_use, 1))
        share = np.minimum(np.float32(1), np.float32(self.interval) / age)
        return float(np.float32(block.worth) * share)

    def reserve(self, count: int, most: int, spare: Sequence[Block] = ()) -> bool:
        short = count - self.num_free
        if short <= 0:
            return True
        victims = self.eviction_order(spare)
        if short > min(len(victims), most):
            return False
        victims = victims[:short]
        for block in victims:
            assert block.key is not None
            namespace, tokens = block.key
            longer = [k for k in self.cached if k[0] == namespace and len(k[1]) > len(tokens)]
            # A block that is not full has no children: longer ones stand beside it.
            if len(tokens) % self.block_size == 0:
                assert not [k for k in longer if k[1][: len(tokens)] == tokens], "left an orphan"
            self.evicted[block.key] = Record(self.now, self.owner, block.uses, block.last_use)
            del self.cached[block.key]
            block.forget()
        return True

    # Sequences.

    def admit(
        self,
        seat: int,
        tokens: Sequence[int],
        namespace: int,
        *,
        most: int | None = None,
        min_copied: int = 1,
        priority: int = 0,
        resumed: bool = False,
        chosen: Key | None = None,
    ) -> tuple[bool, int]:
        """`chosen` is the block that is copied, if any: of equally good ones all are right."""
        size, num_tokens = self.block_size, len(tokens)
        needed = self.blocks_for(num_tokens)
        if not self._is_empty(seat) or not 0 < needed <= self.blocks_per_seq or priority < 0:
            return False, 0
        limit = min(max(num_tokens - 1 if most is None else most, 0), num_tokens)
        path = self.match(tokens, limit // size, namespace)
        start = len(path) * size
        shared = {
            block: min(_common(block.key[1][start:], tokens[start:]), limit - start)
            for block in self.children(tuple(tokens[:start]), namespace)
            if block.key
        }
        longest = max(shared.values(), default=0)
        copied, child = (longest, chosen) if longest >= max(min_copied, 1) else (0, None)
        best = [block.key for block, length in shared.items() if length == longest]

        if not self.reserve(needed - len(path), self.blocks_per_seq, path):
            assert chosen is None
            return False, 0
        assert chosen == child and (child is None) == (copied == 0)
        assert child is None or child in best, f"{child=} shares less than {best=}"
        self.requests += not resumed
        # It may have been evicted to make room for its copy; what it holds is still there.
        source = [] if child is None else [b for b in [self.cached.get(child)] if b]
        self.touch([[*path, *source]], hit=not resumed, priority=[priority])
        blocks = [*path, *(Block() for _ in range(needed - len(path)))]
        found = start + copied
        self.seqs[seat] = Seq(blocks, namespace, list(tokens), found, priority)
        if not resumed:
            self.queries += num_tokens
            self.hits += found
        return True, found

    def append(self, lens: Sequence[int], most: int, namespace: int) -> bool:
        """`namespace` is of those that begin with it."""
        grow: dict[int, int] = {}
        for seat, num_tokens in enumerate(lens):
            have = len(self.seqs[seat].blocks) if seat in self.seqs else 0
            grow[seat] = max(self.blocks_for(num_tokens) - have, 0)
            if have + grow[seat] > self.blocks_per_seq or grow[seat] > most:
                return False
        if not self.reserve(sum(grow.values()), self.num_seats * most):
            return False
        for seat, count in grow.items():
            if count:
                seq = self.seqs.setdefault(seat, Seq([], namespace, []))
                seq.blocks.extend(Block() for _ in range(count))
        return True

    def fork(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Of each (source, target)."""
        targets = [target for _, target in pairs]
        if len(set(targets)) != len(targets):
            return False
        if not all(self._is_used(s) and self._is_empty(t) for s, t in pairs):
            return False
        for source, target in pairs:
            seq = self.seqs[source]
            self.seqs[target] = Seq(
                list(seq.blocks), seq.namespace, list(seq.tokens), seq.written, seq.priority
            )
        return True

    def copy_on_write(self, writes: Sequence[tuple[int, int]]) -> tuple[bool, list[int]]:
        """Of each (seat, position); who copies is the other result."""
        size, seats = self.block_size, [seat for seat, _ in writes]
        if len(set(seats)) != len(seats) or not all(map(self._is_used, seats)):
            return False, []
        for seat, position in writes:
            blocks = self.seqs[seat].blocks
            if not 0 <= position < len(blocks) * size:
                return False, []
            # What comes after it was found by the tokens before, which are about to change.
            if any(block.key for block in blocks[position // size + 1 :]):
                return False, []
        refs, writers = self.refs(), Counter[Block]()
        own = {seat: self.seqs[seat].blocks[position // size] for seat, position in writes}
        writers.update(own.values())
        last = {block: seat for seat, block in own.items()}

        def keeps(seat: int, position: int) -> bool:
            block = own[seat]
            is_found = block.key is not None and position < len(block.key[1])
            return not is_found and refs[block] == writers[block] and last[block] == seat

        copying = [(seat, position) for seat, position in writes if not keeps(seat, position)]
        if not self.reserve(len(copying), len(copying)):
            return False, []
        for seat, position in copying:
            self.seqs[seat].blocks[position // size] = Block()
        return True, [seat for seat, _ in copying]

    def truncate(self, keep: Sequence[tuple[int, int]]) -> bool:
        """Of each (seat, tokens to keep)."""
        seats = [seat for seat, _ in keep]
        if len(set(seats)) != len(seats) or not all(map(self._is_used, seats)):
            return False
        for seat, num_tokens in keep:
            if num_tokens < 0 or self.blocks_for(num_tokens) > len(self.seqs[seat].blocks):
                return False
        seqs = [self.seqs[seat] for seat in seats]
        self.touch([seq.blocks for seq in seqs], priority=[seq.priority for seq in seqs])
        for (seat, num_tokens), seq in zip(keep, seqs, strict=True):
            del seq.blocks[self.blocks_for(num_tokens) :]
            del seq.tokens[num_tokens:]
            seq.written = min(seq.written, num_tokens)
            if not seq.blocks:
                del self.seqs[seat]
        return True

    def publish(
        self, entries: Sequence[Entry], seen: Container[Key] = ()
    ) -> tuple[bool, list[Block]]:
        """The other result are the blocks that are new in the index.

        A name that another block leaves in the same call, for one with more tokens, is taken or
        not: those tokens are found either way. Right is what was `seen`.
        """
        refs, sizes, before_all = self.refs(), dict[Block, int](), set(self.cached)
        for entry, before in zip(entries, [None, *entries], strict=False):
            if not self._can_publish(entry, before, refs):
                return False, []
            block = self.seqs[entry.seat].blocks[entry.column]
            # One block that is both longer and shorter: nobody could say what is in it.
            if sizes.setdefault(block, entry.num_tokens) != entry.num_tokens:
                return False, []
        new: list[Block] = []
        for entry in entries:
            blocks = self.seqs[entry.seat].blocks
            block, key = blocks[entry.column], (entry.namespace, entry.tokens)
            twin = self.cached.get(key)
            if self._known(block) >= entry.num_tokens:
                continue
            if twin is None:
                if key in before_all and key not in seen:
                    continue
                if block.key is None:
                    block.last, block.last_use = self._tick(), self.requests
                    new.append(block)
                    self.new.add(key)
                else:
                    del self.cached[block.key]
                block.key = key
                self.cached[key] = block
            elif entry.num_tokens == self.block_size:
                if block.key is not None:
                    twin.pin_until = max(twin.pin_until, block.pin_until)
                    del self.cached[block.key]
                    block.forget()
                # For all that hold it: what they share after it is found after the twin.
                for seq in self.seqs.values():
                    seq.blocks[:] = [twin if b is block else b for b in seq.blocks]
        return True, new

    def restamp(self, blocks: Sequence[Block]) -> None:
        """Which of the blocks new in one call counts as older, the first, is of no consequence."""
        for block in blocks:
            block.last = self._tick()

    def _can_publish(self, entry: Entry, before: Entry | None, refs: Counter[Block]) -> bool:
        size, seq = self.block_size, self.seqs.get(entry.seat)
        if seq is None or not 0 <= entry.column < len(seq.blocks):
            return False
        if not 1 <= entry.num_tokens <= size:
            return False
        if entry.column:
            parent = seq.blocks[entry.column - 1]
            follows = before is not None and before.num_tokens == size
            follows &= before is not None and before.namespace == entry.namespace
            follows &= before is not None and before.seat == entry.seat
            follows &= before is not None and before.column == entry.column - 1
            found = self._known(parent) == size
            found &= parent.key is not None and parent.key[0] == entry.namespace
            if not (follows or found):
                return False
        block = seq.blocks[entry.column]
        if block.key is not None:
            start = entry.column * size
            pairs = zip(block.key[1][start:], entry.tokens[start:], strict=False)
            if block.key[0] != entry.namespace or any(a != b for a, b in pairs):
                return False
        return refs[block] == 1 or not 0 < self._known(block) < entry.num_tokens

    def _known(self, block: Block) -> int:
        """Tokens of the block itself by which it can be found."""
        if block.key is None:
            return 0
        return (len(block.key[1]) - 1) % self.block_size + 1

    # Pins.

    def pin(self, blocks: Sequence[Block], until: int) -> tuple[bool, int]:
        prolonged = {block: max(block.pin_until, until) for block in blocks}
        pinned = {b: prolonged.get(b, b.pin_until) > self.now for b in self.cached.values()}
        if sum(pinned.values()) > self.pin_budget:
            return False, 0
        for block, time in prolonged.items():
            block.pin_until = time
        return True, sum(pinned[block] for block in prolonged)

    def pin_sequence(self, seat: int, until: int) -> tuple[bool, int]:
        if not self._is_used(seat):
            return False, 0
        return self.pin([block for block in self.seqs[seat].blocks if block.key], until)

    def in_namespace(self, namespace: int) -> list[Block]:
        return [block for (ns, _), block in self.cached.items() if ns == namespace]

    def unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pin_until = 0
        for block in blocks:
            assert block.key is not None
            namespace, tokens = block.key
            if len(tokens) % self.block_size:
                continue
            block.pin_until = max(
                other.pin_until
                for (ns, longer), other in self.cached.items()
                if ns == namespace and longer[: len(tokens)] == tokens
            )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)
