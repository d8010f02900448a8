"""A caller that does anything to the block manager, and to the plain-Python model, in turn.

After every operation both must mean the same, and a refused one must change nothing at all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo import paged

from .meaning import Host, Memory, assert_same
from .model import Block, Entry, Model

SEATS, BLOCKS, NEW, FILLED, ROWS = 4, 10, 2, 6, 3
BUDGET, HISTORY, PROTECTED = 4, 16, 3
SLOPE, MOST = 0.5, 2.0  # it costs no more from the third block on
LARGEST, SMALLEST = 2**31 - 1, -(2**31)
ODD = (-1, -2, 1000, LARGEST, SMALLEST)

# Compiled once for all runs; a policy is data, so the policies share programs too.
jitted = SimpleNamespace(
    append=jax.jit(partial(paged.append, max_new_blocks=NEW)),
    reserve=jax.jit(partial(paged.reserve, max_count=NEW)),
    **{
        name: jax.jit(getattr(paged, name))
        for name in (
            *("admit", "copy_on_write", "fork", "match", "pin_namespace", "pin_sequence"),
            *("pin_tokens", "publish", "release", "truncate", "unpin_namespace", "unpin_tokens"),
        )
    },
)

odd = st.sampled_from(ODD)
# Which of the seats that fit, or, from 29 on, one that may not.
picks = st.integers(0, 31)
several = st.lists(picks, min_size=1, max_size=ROWS)
masks = st.lists(st.sampled_from([True, True, False]), min_size=ROWS, max_size=ROWS)
# Few values: nearly every prompt shares something with another.
token = st.sampled_from([0, 0, 0, 1, 1, 2])
namespaces = st.sampled_from([0, 0, 0, 0, 1, 1, -1])
# One that was met, how many of its tokens, those that follow, and the namespace of a new one.
prompts = st.tuples(st.integers(0, 15), st.integers(0, 16), st.lists(token, max_size=8), namespaces)
known = st.tuples(
    *(st.integers(0, 12), st.sampled_from([16, 16, 8, 4, 2])), st.just([]), namespaces
)
Prompt = tuple[int, int, list[int], int]
steps = st.lists(token, min_size=1, max_size=4)
until = st.sampled_from([paged.FOREVER, 1, 2, 3, 0, -5])
# Distances from what is written; larger ones are positions.
backs = st.lists(st.sampled_from([0, 0, 1, 2, 3, -1, 4, *ODD]), min_size=ROWS, max_size=ROWS)


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64).astype(np.int32)


class Manager(RuleBasedStateMachine):
    policy: str
    size: int
    columns: int

    @initialize(far=st.booleans(), earlier=st.lists(prompts, max_size=6))
    def begin(self, far: bool, earlier: list[Prompt]) -> None:
        policy = paged.eviction_policy(self.policy, slope=SLOPE, most=MOST, protected=PROTECTED)
        state = paged.init_cache(
            BLOCKS, self.size, policy=policy, pin_budget=BUDGET, history_len=HISTORY
        )
        self.model = Model(
            num_blocks=BLOCKS,
            block_size=self.size,
            num_seats=SEATS,
            blocks_per_seq=self.columns,
            policy=self.policy,
            slope=SLOPE,
            most=MOST,
            protected=PROTECTED,
            pin_budget=BUDGET,
        )
        if far:  # the access clock is about to be limited, the counters' low words to overflow
            words = np.array([2**32 - 5, 0], np.uint32)
            state = replace(
                state,
                index=replace(state.index, clock=jnp.int32((1 << 30) - 9)),
                counters=paged.Counters(queries=jnp.array(words), hits=jnp.array(words)),
            )
            self.model.queries = self.model.hits = 2**32 - 5
        self.state, self.tables = state, paged.init_tables(SEATS, self.columns)
        self.memory = Memory(BLOCKS, self.size)
        self.host = Host(self.state, self.tables)
        self.kept: list[Any] = []
        for prompt in earlier:
            self.serve(prompt, False, 0, True, True)

    # How operations are called, and what is checked after each.

    def call(self, op: str, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Run an operation on state and tables; its other results, of which the last is `ok`."""
        self.means_the_same()  # a rule may call several
        state, tables, *results = getattr(jitted, op)(self.state, self.tables, *args, **options)
        self.go_on(state, tables, bool(jax.tree.leaves(results[-1])[0]))
        return tuple(results)

    def go_on(self, state: paged.CacheState, tables: paged.BlockTables, ok: bool = True) -> None:
        before, self.state, self.tables = self.host, state, tables
        self.host = Host(state, tables)
        self.memory.learn(self.host)
        if not ok:
            both = (before.state, before.tables), (self.host.state, self.host.tables)
            jax.tree.map(np.testing.assert_array_equal, *both)

    @invariant()
    def means_the_same(self) -> None:
        if hasattr(self, "host"):
            paged.check_invariants(self.state, self.tables)
            assert_same(self.model, self.memory, self.host)

    # What is drawn, made fit for the state.

    def seat(self, pick: int, taken: Sequence[int] = (), *, live: bool = True) -> int:
        fit = [s for s in range(SEATS) if (s in self.model.seqs) == live and s not in taken]
        others = [*ODD, SEATS, *(s for s in range(SEATS) if s not in fit)]
        return fit[pick % len(fit)] if pick < 29 and fit else others[pick % len(others)]

    def seats(self, some: list[int], *, live: bool = True) -> list[int]:
        rows: list[int] = []
        for pick in some:
            rows.append(self.seat(pick, rows, live=live))
        return rows

    def positions(self, rows: list[int], back: list[int]) -> list[int]:
        seqs = self.model.seqs
        return [
            seqs[row].written - n if abs(n) < 5 and row in seqs else n
            for row, n in zip(rows, back, strict=False)
        ]

    def padded(self, *columns: list[int], enabled: list[bool]) -> tuple[list[Any], jax.Array]:
        """Arguments of one length; what is added, odd as it is, is not enabled."""
        rows = len(columns[0])
        full = [ints([*column, *[LARGEST] * (ROWS - rows)]) for column in columns]
        return full, jnp.array([*enabled[:rows], *[False] * (ROWS - rows)])

    def prompt(self, drawn: Prompt) -> tuple[list[int], int]:
        like, keep, tail, namespace = drawn
        met = sorted(self.model.cached) + [
            (seq.namespace, tuple(seq.tokens)) for _, seq in sorted(self.model.seqs.items())
        ]
        if not met or like > 12:
            return tail, namespace
        namespace, tokens = met[like % len(met)]
        return [*tokens[:keep], *tail], namespace

    def short_prompt(self, drawn: Prompt) -> tuple[list[int], int]:
        tokens, namespace = self.prompt(drawn)
        return tokens[: self.columns * self.size], namespace

    def cut(self, tokens: Sequence[int]) -> np.ndarray:
        padded = np.full(self.columns * self.size, 7, np.int32)  # not zeros: padding is no token
        padded[: len(tokens)] = tokens[: padded.size]
        return padded.reshape(self.columns, self.size)

    # Admission.

    @rule(
        pick=picks,
        drawn=prompts,
        most=st.one_of(st.none(), st.none(), st.integers(-1, 9), odd),
        min_copied=st.sampled_from([1, 1, 1, 2, 0, 9, -1]),
        priority=st.sampled_from([0, 0, 0, 1, 2, LARGEST, -1]),
        resumed=st.sampled_from([False, False, True]),
    )
    def admit(self, pick, drawn, most, min_copied, priority, resumed) -> None:
        self.begin_sequence(
            self.seat(pick, live=False), *self.prompt(drawn), most, min_copied, priority, resumed
        )

    def begin_sequence(
        self, seat, tokens, namespace, most=None, min_copied=1, priority=0, resumed=False
    ) -> bool:
        most = len(tokens) - 1 if most is None else most
        names = self.host.names
        (admission,) = self.call(
            "admit",
            *(seat, self.cut(tokens), len(tokens), namespace),
            max_cached_tokens=most,
            min_copied_tokens=min_copied,
            priority=priority,
            resumed=resumed,
        )
        copies = admission.copies
        ok, found = self.model.admit(
            *(seat, tokens, namespace),
            most=most,
            min_copied=min_copied,
            priority=priority,
            resumed=resumed,
            chosen=names.get(int(copies.source)),
        )
        assert (bool(admission.ok), int(admission.num_cached_tokens)) == (ok, found)
        is_copied = found % self.size > 0
        target = self.host.row(seat)[found // self.size] if is_copied else 0
        assert (int(copies.source) > 0, int(copies.target)) == (is_copied, target)
        self.memory.copy(copies)
        return ok

    @rule(
        pick=picks,
        num_tokens=st.sampled_from([0, -1, 1000, LARGEST, SMALLEST]),
        priority=st.sampled_from([0, -1, SMALLEST]),
    )
    def admit_badly(self, pick: int, num_tokens: int, priority: int) -> None:
        args = self.seat(pick, live=False), self.cut([0] * 4), num_tokens, 0
        options = {"max_cached_tokens": LARGEST, "min_copied_tokens": 1, "resumed": False}
        (admission,) = self.call("admit", *args, priority=priority, **options)
        assert not any(map(np.any, jax.tree.leaves(admission))), "refused, and yet a result"

    @rule(
        several=st.lists(prompts, min_size=1, max_size=4),
        resumed=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        publish=st.sampled_from([True, True, False]),
        release=st.booleans(),
    )
    def serve_some(self, several, resumed, priority, publish, release) -> None:
        for drawn in several:
            self.serve(drawn, resumed, priority, publish, release)

    def serve(self, drawn, resumed: bool, priority: int, publish: bool, release: bool) -> None:
        """A request: admitted, computed, published and done with."""
        empty = [seat for seat in range(SEATS) if seat not in self.model.seqs]
        tokens, namespace = self.short_prompt(drawn)
        if not empty or not tokens:
            return
        seat = empty[0]
        if self.begin_sequence(seat, tokens, namespace, None, 1, priority, resumed):
            self.write(seat, len(tokens))
            if publish:
                self.publish([(seat, column, LARGEST) for column in range(self.columns)])
            if release:
                self.release_rows([seat], [True])

    # Computing.

    @rule(pick=picks, count=st.integers(1, 8))
    def compute(self, pick: int, count: int) -> None:
        seat = self.seat(pick)
        if seat in self.model.seqs:
            seq = self.model.seqs[seat]
            self.write(seat, min(seq.written + count, len(seq.tokens)))

    @rule(pick=picks, to=picks, value=token)
    def write_and_share(self, pick: int, to: int, value: int) -> None:
        """A block that is found by fewer tokens than both of its holders know."""
        rows = [self.seat(pick)]
        self.generate(rows, [value], False, True)
        self.generate(rows, [value], False, False)
        self.share(rows, [self.seat(to, live=False)], [True])
        self.publish([(row, column, LARGEST) for row in rows for column in range(self.columns)])

    def write(self, seat: int, end: int) -> None:
        """Write a sequence's tokens up to `end`, each block made its own before."""
        seq, own = self.model.seqs[seat], False
        while seq.written < end:
            if not own and not self.own([seat], [seq.written], [True]):
                return
            self.write_token(seat)
            own = seq.written % self.size > 0

    def write_token(self, seat: int) -> None:
        seq = self.model.seqs[seat]
        column, slot = divmod(seq.written, self.size)
        seq.written += 1
        content = seq.namespace, tuple(seq.tokens[: seq.written])
        self.memory.write(self.host, self.host.row(seat)[column], slot, content)

    def own(self, rows: list[int], positions: list[int], enabled: list[bool]) -> bool:
        before = self.host
        (seats, at), mask = self.padded(rows, positions, enabled=enabled)
        copies, ok = self.call("copy_on_write", seats, at, enabled=mask)
        writes = zip(zip(rows, positions, strict=False), enabled, strict=False)
        want, copying = self.model.copy_on_write([write for write, on in writes if on])
        assert bool(ok) == want
        for row, position, source in zip(
            rows, positions, np.asarray(copies.source).tolist(), strict=False
        ):
            there = before.row(row)[position // self.size] if row in copying else 0
            assert source == there, "copied another block than the one to be written"
        self.memory.copy(copies)
        return want

    @rule(some=several, values=steps, split=st.booleans(), publish=st.booleans())
    def decode(self, some: list[int], values: list[int], split: bool, publish: bool) -> None:
        self.generate(self.seats(some), values, split, publish)

    @rule(source=picks, to=picks, values=steps, publish=st.booleans())
    def branch(self, source: int, to: int, values: list[int], publish: bool) -> None:
        """Beams: two sequences go on from one, the same way or not."""
        rows = [self.seat(source), self.seat(to, live=False)]
        self.share(rows[:1], rows[1:], [True])
        self.generate(rows, values, values[0] > 0, publish)

    @rule(pick=picks, back=st.integers(1, 4), values=steps, publish=st.booleans())
    def retry(self, pick: int, back: int, values: list[int], publish: bool) -> None:
        """What speculative decoding does: take back the last tokens, and go on elsewhere."""
        rows = [self.seat(pick)]
        self.keep(rows, self.positions(rows, [back]), [True])
        self.generate(rows, values, False, publish)

    def generate(self, rows: list[int], values: list[int], split: bool, publish: bool) -> None:
        """Steps of an engine: grow, own, write and publish."""
        seqs = self.model.seqs
        rows = [row for row in dict.fromkeys(rows) if row in seqs]
        rows = [row for row in rows if seqs[row].written == len(seqs[row].tokens)]
        for value in values if rows else []:
            positions = [seqs[row].written for row in rows]
            lens = [seqs[row].written + 1 if row in rows else 0 for row in range(SEATS)]
            if not self.grow(lens, 0) or not self.own(rows, positions, [True] * len(rows)):
                return
            for row in rows:
                seqs[row].tokens.append((value + row * split) % 3)
                self.write_token(row)
            if publish:
                places = zip(rows, positions, strict=True)
                self.publish([(row, at // self.size, LARGEST) for row, at in places])

    @rule(
        lens=st.lists(st.sampled_from([0, 0, *range(10), *ODD]), min_size=SEATS, max_size=SEATS),
        namespace=namespaces,
    )
    def append(self, lens: list[int], namespace: int) -> None:
        self.grow(lens, namespace)

    @rule(pick=picks, num_tokens=st.integers(0, 12), namespace=namespaces)
    def look_ahead(self, pick: int, num_tokens: int, namespace: int) -> None:
        seat = self.seat(pick)
        self.grow([num_tokens if row == seat else 0 for row in range(SEATS)], namespace)

    def grow(self, lens: list[int], namespace: int) -> bool:
        (ok,) = self.call("append", ints(lens))
        want = self.model.append(lens, NEW, namespace)
        assert bool(ok) == want
        return want

    @rule(some=several, back=backs, enabled=masks)
    def copy_anywhere(self, some: list[int], back: list[int], enabled: list[bool]) -> None:
        rows = self.seats(some)
        positions = self.positions(rows, back)
        for row, position in zip(rows, positions, strict=True):
            # Who goes back further has to truncate first. The manager notices if what comes
            # after is indexed; that it was written is what only the caller can know.
            written = self.model.seqs[row].written if row in self.model.seqs else 0
            if 0 <= position // self.size < (written - 1) // self.size:
                blocks = self.model.seqs[row].blocks[position // self.size + 1 :]
                if not any(block.key for block in blocks):
                    return
        self.own(rows, positions, enabled)

    # Publishing.

    @rule(
        wanted=st.lists(
            st.tuples(
                *(picks, st.integers(0, 3), st.integers(1, 3)),
                st.sampled_from([LARGEST, LARGEST, 1, 2, 3]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def publish_some(self, wanted: list[tuple[int, int, int, int]]) -> None:
        """Stretches of sequences, of their last blocks not always all that is written."""
        self.publish(
            [
                (self.seat(pick), column, at_most if column == start + count - 1 else LARGEST)
                for pick, start, count, at_most in wanted
                for column in range(start, start + count)
            ]
        )

    @rule(turned=st.booleans())
    def publish_all(self, turned: bool) -> None:
        rows = sorted(self.model.seqs, reverse=turned)
        self.publish([(row, column, LARGEST) for row in rows for column in (0, 1)])
        self.publish([(row, column, LARGEST) for row in rows for column in (2, 3)])

    def publish(self, wanted: list[tuple[int, int, int]]) -> None:
        """Publish what is written at (seat, column), of each block so many tokens at most."""
        self.publish_entries(self.entries(wanted))

    def entries(self, wanted: list[tuple[int, int, int]]) -> list[Entry]:
        entries: list[Entry] = []
        for seat, column, at_most in wanted:
            seq = self.model.seqs.get(seat)
            written = seq.written - column * self.size if seq else 0
            count = min(self.size, at_most, written)
            if seq and count > 0 and len(entries) < FILLED:
                tokens = tuple(seq.tokens[: column * self.size + count])
                entries.append(Entry(seat, column, count, tokens, seq.namespace))
        return entries

    def publish_entries(self, entries: list[Entry]) -> None:
        (ok,) = self.call("publish", self.filled(entries), len(entries))
        names = self.host.names
        want, new = self.model.publish(entries, set(names.values()))
        assert bool(ok) == want
        age = {key: int(self.host.state.index.last_access[b]) for b, key in names.items()}
        self.model.restamp(sorted(new, key=lambda block: age[block.key or (0, ())]))

    def filled(self, entries: list[Entry]) -> paged.FilledBlocks:
        blocks = np.full((FILLED, self.size), 7, np.int32)
        numbers = np.full((4, FILLED), -1, np.int64)
        for i, entry in enumerate(entries):
            numbers[:, i] = entry.seat, entry.column, entry.num_tokens, entry.namespace
            tokens = entry.tokens[max(entry.column, 0) * self.size :]
            blocks[i, : len(tokens)] = tokens
        seat, column, num_tokens, namespace = (ints(row.tolist()) for row in numbers)
        return paged.FilledBlocks(
            seat=seat, column=column, tokens=blocks, num_tokens=num_tokens, namespace=namespace
        )

    @rule(
        pick=picks,
        column=st.one_of(st.integers(0, 3), odd),
        num_tokens=st.one_of(st.integers(0, 5), odd),
        good=st.integers(0, 2),
        count=st.sampled_from([None, None, None, -1, FILLED + 1, LARGEST, SMALLEST]),
    )
    def publish_badly(self, pick, column, num_tokens, good: int, count: int | None) -> None:
        """After good entries one without a place, or in another namespace than its parent."""
        seat, entries = self.seat(pick), list[Entry]()
        for row, seq in sorted(self.model.seqs.items()):
            first = min(self.size, seq.written)
            if first and len(entries) < good:
                entries.append(Entry(row, 0, first, tuple(seq.tokens[:first]), seq.namespace))
        seq, end = self.model.seqs.get(seat), column * self.size + num_tokens
        bad = Entry(seat, column, num_tokens, (), 0)
        if seq and 0 <= column < len(seq.blocks) and 0 < num_tokens <= self.size:
            if column == 0 or end > seq.written:
                return
            bad = Entry(seat, column, num_tokens, tuple(seq.tokens[:end]), seq.namespace + 1)
        entries.append(bad)
        assert not copy.deepcopy(self.model).publish(entries)[0]
        (ok,) = self.call("publish", self.filled(entries), len(entries) if count is None else count)
        assert not ok

    # Sharing.

    @rule(source=several, to=several, enabled=masks)
    def fork(self, source: list[int], to: list[int], enabled: list[bool]) -> None:
        self.share([self.seat(pick) for pick in source], self.seats(to, live=False), enabled)

    @rule(source=picks, to=picks)
    def fork_one(self, source: int, to: int) -> None:
        self.share([self.seat(source)], [self.seat(to, live=False)], [True])

    def share(self, sources: list[int], targets: list[int], enabled: list[bool]) -> None:
        pairs = list(zip(sources, targets, strict=False))
        (source, target), mask = self.padded(*map(list, zip(*pairs, strict=True)), enabled=enabled)
        (ok,) = self.call("fork", source, target, enabled=mask)
        want = self.model.fork([pair for pair, on in zip(pairs, enabled, strict=False) if on])
        assert bool(ok) == want

    @rule(some=several, back=backs, enabled=masks)
    def truncate(self, some: list[int], back: list[int], enabled: list[bool]) -> None:
        rows = self.seats(some)
        self.keep(rows, self.positions(rows, back), enabled)

    @rule(pick=picks, num_tokens=st.integers(0, 9))
    def truncate_far(self, pick: int, num_tokens: int) -> None:
        self.keep([self.seat(pick)], [num_tokens], [True])

    def keep(self, rows: list[int], num_tokens: list[int], enabled: list[bool]) -> None:
        (seats, kept), mask = self.padded(rows, num_tokens, enabled=enabled)
        (ok,) = self.call("truncate", seats, kept, enabled=mask)
        cuts = zip(rows, num_tokens, enabled, strict=False)
        assert bool(ok) == self.model.truncate([(row, n) for row, n, on in cuts if on])

    @rule(some=several, enabled=masks)
    def release(self, some: list[int], enabled: list[bool]) -> None:
        self.release_rows(self.seats(some), enabled)

    def release_rows(self, rows: list[int], enabled: list[bool]) -> None:
        (seats,), mask = self.padded(rows, enabled=enabled)
        (ok,) = self.call("release", seats, enabled=mask)
        gone = [(row, 0) for row, on in zip(rows, enabled, strict=False) if on]
        assert bool(ok) == self.model.truncate(gone)

    @rule(more=st.integers(0, 3))
    def reserve(self, more: int) -> None:
        self.make_room(self.model.num_free + more)

    @rule(count=st.one_of(st.integers(0, BLOCKS), odd))
    def make_room(self, count: int) -> None:
        state, ok = jitted.reserve(self.state, count)
        self.go_on(state, self.tables, bool(ok))
        assert bool(ok) == self.model.reserve(count, NEW)

    # Pins and time.

    @rule(drawn=known, num_tokens=st.sampled_from([None] * 9 + [*ODD]), until=until)
    def pin_tokens(self, drawn, num_tokens: int | None, until: int) -> None:
        tokens, namespace = self.short_prompt(drawn)
        count, time = len(tokens) if num_tokens is None else num_tokens, self.time(until)
        args = self.cut(tokens), count, namespace, time
        want = self.model.pin(self.path(tokens, count, namespace), time)
        self.pinned(jitted.pin_tokens(self.state, *args), want)

    @rule(pick=picks, until=until)
    def pin_sequence(self, pick: int, until: int) -> None:
        seat, time = self.seat(pick), self.time(until)
        want = self.model.pin_sequence(seat, time)
        self.pinned(jitted.pin_sequence(self.state, self.tables, seat, time), want)

    @rule(pinned=known, ended=known, served=prompts, passed=st.integers(0, 3), until=until)
    def pin_for_a_while(self, pinned, ended, served, passed: int, until: int) -> None:
        """A pin, some of it ended early, and room made once all or part of it is over."""
        self.pin_tokens(pinned, None, until)
        self.unpin_tokens(ended, None)
        self.time_passes(passed, 0)
        self.serve(served, False, 0, True, True)
        self.reserve(2)

    @rule(namespace=namespaces, until=until)
    def pin_namespace(self, namespace: int, until: int) -> None:
        want = self.model.pin(self.model.in_namespace(namespace), self.time(until))
        self.pinned(jitted.pin_namespace(self.state, namespace, self.time(until)), want)

    def pinned(self, got: tuple[paged.CacheState, Any, Any], want: tuple[bool, int]) -> None:
        state, count, ok = got
        self.go_on(state, self.tables, bool(ok))
        assert (bool(ok), int(count)) == want

    def time(self, until: int) -> int:
        return until if until in (paged.FOREVER, -5) else self.model.now + until

    def path(self, tokens: list[int], num_tokens: int, namespace: int) -> list[Block]:
        padded = self.cut(tokens).reshape(-1).tolist()
        return self.model.match(padded, max(num_tokens, 0) // self.size, namespace)

    @rule(drawn=known, num_tokens=st.sampled_from([None] * 9 + [*ODD]))
    def unpin_tokens(self, drawn, num_tokens: int | None) -> None:
        tokens, namespace = self.short_prompt(drawn)
        count = len(tokens) if num_tokens is None else num_tokens
        args = self.cut(tokens), count, namespace
        self.go_on(jitted.unpin_tokens(self.state, *args), self.tables)
        self.model.unpin(self.path(tokens, count, namespace))

    @rule(namespace=namespaces)
    def unpin_namespace(self, namespace: int) -> None:
        self.go_on(jitted.unpin_namespace(self.state, namespace), self.tables)
        self.model.unpin(self.model.in_namespace(namespace))

    @rule(passed=st.integers(0, 2), owner=st.integers(0, 3))
    def time_passes(self, passed: int, owner: int) -> None:
        self.model.now, self.model.owner = self.model.now + passed, owner
        self.go_on(paged.acting(self.state, now=self.model.now, owner=owner), self.tables)

    # Looking, and going back.

    @rule(drawn=prompts, limit=st.one_of(st.integers(0, 4), odd))
    def look(self, drawn, limit: int) -> None:
        tokens, namespace = self.short_prompt(drawn)
        ids, matched = jitted.match(self.state.index, self.cut(tokens), limit, namespace)
        want = self.path(tokens, max(limit, 0) * self.size, namespace)
        assert int(matched) == len(want)
        want_names = [block.key for block in want] + [None] * (self.columns - len(want))
        assert [self.host.names.get(b) for b in np.asarray(ids).tolist()] == want_names

    @rule()
    def keep_a_snapshot(self) -> None:
        self.kept.append((self.state, self.tables, copy.deepcopy((self.model, self.memory))))

    @rule(which=st.integers(0, 3))
    def go_back(self, which: int) -> None:
        if self.kept:
            state, tables, rest = self.kept[which % len(self.kept)]
            self.model, self.memory = copy.deepcopy(rest)
            self.go_on(state, tables)

    def teardown(self) -> None:
        if hasattr(self, "host"):
            for seat in sorted(self.model.seqs):
                self.release_rows([seat], [True])
            self.means_the_same()
            assert self.model.num_active == 0, "released, and yet blocks are held"


def machine(policy: str, size: int) -> type[Manager]:
    fields = {"policy": policy, "size": size, "columns": 8 // size + 1}
    return type("ManagerUnderTest", (Manager,), fields)
