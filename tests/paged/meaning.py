"""What a real state means, and that it is what the plain-Python model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from octavo import paged
from octavo.paged import hashing

from .model import Block, Key, Model, Record

Slot = Key | None  # the tokens up to and including the slot's: keys and values depend on all


@dataclass
class Host:
    """A state and its tables on the host, with the prefix of every indexed block by its id."""

    state: paged.CacheState
    tables: paged.BlockTables

    def __post_init__(self) -> None:
        self.state, self.tables = jax.tree.map(np.asarray, (self.state, self.tables))
        index = self.state.index
        self.names: dict[int, Key] = {}
        for block in np.flatnonzero(np.asarray(index.num_tokens)).tolist():
            tokens: list[int] = []
            at = block
            while at:
                tokens[:0] = np.asarray(index.tokens)[at, : int(index.num_tokens[at])].tolist()
                at = int(index.parent[at])
            self.names[block] = int(index.namespace[block]), tuple(tokens)

    def row(self, seat: int) -> list[int]:
        """Ids of a sequence's blocks."""
        length = int(self.tables.num_blocks[seat])
        return np.asarray(self.tables.block_ids)[seat, :length].tolist()


class Memory:
    """What every slot of the cache holds, kept as a careful caller writes and copies it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.hashes: dict[Key, int] = {}  # seen in the index, for what is evicted later

    def learn(self, host: Host) -> None:
        for block, key in host.names.items():
            value = int(host.state.index.hash[block])
            assert self.hashes.setdefault(key, value) == value, "one prefix has two hashes"

    def copy(self, copies: paged.BlockCopies) -> None:
        sources = np.atleast_1d(copies.source).tolist()
        targets = np.atleast_1d(copies.target).tolist()
        assert all((s == 0) == (t == 0) for s, t in zip(sources, targets, strict=True))
        held = [list(self.slots[source]) for source in sources]
        for slots, target in zip(held, targets, strict=True):
            if target:
                self.slots[target] = slots

    def write(self, host: Host, block: int, slot: int, content: Key) -> None:
        assert int(host.state.pool.ref_count[block]) == 1, "wrote to a block that others hold"
        assert slot >= int(host.state.index.num_tokens[block]), "wrote to a slot that is indexed"
        self.slots[block][slot] = content


@jax.jit
def readings(
    state: paged.CacheState, tables: paged.BlockTables, context_lens: jax.Array
) -> tuple[Any, ...]:
    """Everything that can be asked of a state."""
    use = paged.namespace_use(state, 3)
    waste = paged.unfilled_slots(tables, context_lens, state.index.block_size)
    return paged.stats(state), use, waste


def assert_same(model: Model, memory: Memory, host: Host) -> None:
    """Full equality of meaning."""
    _assert_same_index(model, host)
    _assert_same_tables(model, host)
    _assert_same_readings(model, host)
    _assert_same_history(model, memory, host)
    _assert_contents(model, memory, host)


def _assert_same_index(model: Model, host: Host) -> None:
    index, names = host.state.index, host.names
    assert sorted(names.values()) == sorted(model.cached)
    by_age = sorted(names, key=lambda block: int(index.last_access[block]))
    assert [names[b] for b in by_age] == sorted(model.cached, key=lambda k: model.cached[k].last)
    for block, key in names.items():
        want = model.cached[key]
        for name in ("hits", "last_use", "priority"):
            assert getattr(index, name)[block] == getattr(want, name), (name, key)
        _assert_worth(model, want, float(index.uses[block]), float(index.worth[block]))
        pins = [int(index.pin_until[block]), want.pin_until]
        assert len({until if until > model.now else 0 for until in pins}) == 1, (pins, key)
    interval = float(host.state.policy.interval)
    assert interval == pytest.approx(model.interval, rel=0.05 if model.new else 1e-5)
    model.interval = interval
    model.new.clear()
    assert int(host.state.policy.requests) == model.requests


def _assert_worth(model: Model, want: Block, uses: float, worth: float) -> None:
    """What is worth what, to the last digits; from there the model goes on with the real floats."""
    assert want.key is not None
    before = model.evicted.get(want.key)
    if want.key in model.new and not hashes_collide():
        # The history may have forgotten what was evicted, and then it begins anew.
        again = 0.0 if before is None else uses_after(model, before)
        assert uses == pytest.approx(again, rel=1e-4) or uses == 0
    elif want.key not in model.new:
        assert uses == pytest.approx(want.uses, rel=1e-5)
    assert worth == pytest.approx(want.worth, rel=1e-5)
    want.uses, want.worth = uses, worth


def uses_after(model: Model, before: Record) -> float:
    return model.aged(before.uses, model.requests - before.last_use) + 1


def hashes_collide() -> bool:
    return hashing._MULTIPLIER == 1


def _assert_same_tables(model: Model, host: Host) -> None:
    """Rows hold the same blocks: one id for one block of the model, found by the same prefix."""
    pairs: set[tuple[int, Block]] = set()
    for seat in range(model.num_seats):
        seq = model.seqs.get(seat)
        blocks = seq.blocks if seq else []
        assert int(host.tables.num_blocks[seat]) == len(blocks)
        assert int(host.tables.priority[seat]) == (seq.priority if seq else 0)
        for block_id, block in zip(host.row(seat), blocks, strict=True):
            assert host.names.get(block_id) == block.key
            pairs.add((block_id, block))
    assert len(pairs) == len({i for i, _ in pairs}) == len({b for _, b in pairs})


def _assert_same_readings(model: Model, host: Host) -> None:
    lens = [len(model.seqs[s].tokens) if s in model.seqs else 0 for s in range(model.num_seats)]
    stats, use, waste = jax.tree.map(
        np.asarray, readings(host.state, host.tables, np.array(lens, np.int32))
    )
    assert [int(n) for n in (stats.num_free, stats.num_cached, stats.num_active)] == [
        model.num_free,
        model.num_cached,
        model.num_active,
    ]
    assert int(stats.num_pinned) == model.num_pinned
    for counter, want in (
        (stats.counters.queries, model.queries),
        (stats.counters.hits, model.hits),
    ):
        assert int(counter[0]) + (int(counter[1]) << 32) == want
    assert use.tolist() == [len(model.in_namespace(ns)) for ns in range(3)]
    slots = sum(len(seq.blocks) for seq in model.seqs.values()) * model.block_size
    assert [int(n) for n in waste] == [slots, slots - sum(lens)]


def _assert_same_history(model: Model, memory: Memory, host: Host) -> None:
    """It may forget, but what it remembers is the last eviction of that prefix."""
    history = host.state.history
    assert bool(len(model.evicted)) == bool((np.asarray(history.uses) >= 0).any())
    if hashes_collide():
        return
    last = {memory.hashes[key]: record for key, record in model.evicted.items()}
    for place in np.flatnonzero(np.asarray(history.uses) >= 0):
        record = last[int(history.hash[place])]
        assert (int(history.time[place]), int(history.owner[place])) == record[:2]


def _assert_contents(model: Model, memory: Memory, host: Host) -> None:
    """Every block holds what it is found by, and what its sequences wrote."""
    size = model.block_size
    for block, (namespace, tokens) in host.names.items():
        start = (len(tokens) - 1) // size * size
        for end in range(start + 1, len(tokens) + 1):
            assert memory.slots[block][end - 1 - start] == (namespace, tokens[:end])
    for seat, seq in model.seqs.items():
        row = host.row(seat)
        for at in range(seq.written):
            content = memory.slots[row[at // size]][at % size]
            assert content == (seq.namespace, tuple(seq.tokens[: at + 1]))
