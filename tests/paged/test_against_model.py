"""Random operations on the block manager and on the plain-Python model mean the same."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo import paged
from octavo.paged import hashing

from .model import Model, assert_same

SEATS, COLUMNS, SIZE, BLOCKS, NEW = 3, 4, 2, 9, 2
seats = st.integers(0, SEATS - 1)
# Two token values and two namespaces: nearly every prompt shares something with another.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=COLUMNS * SIZE + 1)
namespaces = st.integers(0, 1)


class Manager(RuleBasedStateMachine):
    ops: dict

    def __init__(self) -> None:
        super().__init__()
        self.state = paged.init_cache(BLOCKS, SIZE)
        self.tables = paged.init_tables(SEATS, COLUMNS)
        self.model = Model(num_blocks=BLOCKS, block_size=SIZE, blocks_per_seq=COLUMNS)
        self.tokens: dict[int, tuple[list[int], int]] = {}

    def call(self, op: str, *args, **kwargs):
        before = jax.tree.map(np.asarray, (self.state, self.tables))
        state, tables, result = self.ops[op](self.state, self.tables, *args, **kwargs)
        ok = bool(result.ok if isinstance(result, paged.Admission) else result)
        if not ok:
            jax.tree.map(np.testing.assert_array_equal, before, (state, tables))
        self.state, self.tables = state, tables
        return ok, result

    @rule(seat=st.integers(-1, SEATS), tokens=prompts, namespace=namespaces)
    def admit(self, seat: int, tokens: list[int], namespace: int) -> None:
        padded = np.zeros((COLUMNS, SIZE), np.int32)
        flat = padded.reshape(-1)
        flat[: len(tokens)] = tokens[: flat.size]
        got, admission = self.call("admit", seat, padded, len(tokens), namespace)
        if not 0 <= seat < SEATS:
            assert not got
            return
        want, cached = self.model.admit(seat, tokens, namespace)
        assert (got, int(admission.num_cached_blocks)) == (want, cached)
        if got:
            self.tokens[seat] = (list(tokens), namespace)

    @rule(grow=st.lists(st.integers(0, 3), min_size=SEATS, max_size=SEATS), bit=st.integers(0, 1))
    def append(self, grow: list[int], bit: int) -> None:
        lens = {
            seat: len(self.tokens[seat][0]) + more if seat in self.tokens else 0
            for seat, more in enumerate(grow)
        }
        want = self.model.append(lens, NEW)
        got, _ = self.call("append", jnp.array([lens[s] for s in range(SEATS)], jnp.int32))
        assert got == want
        if got:
            for seat, more in enumerate(grow):
                if seat in self.tokens:
                    self.tokens[seat][0].extend([bit] * more)

    @rule(seat=seats, column=st.integers(-1, COLUMNS))
    def publish(self, seat: int, column: int) -> None:
        tokens, namespace = self.tokens.get(seat, ([0] * COLUMNS * SIZE, 0))
        end = (column + 1) * SIZE
        if end > len(tokens):
            return
        block = tokens[end - SIZE : end] if column >= 0 else [0] * SIZE
        filled = paged.FilledBlocks(
            seat=jnp.array([seat, 0], jnp.int32),
            column=jnp.array([column, 0], jnp.int32),
            tokens=jnp.array([block, [0] * SIZE], jnp.int32),
            namespace=jnp.array([namespace, 0], jnp.int32),
        )
        want = self.model.publish(seat, column, tokens[:end], namespace)
        got, _ = self.call("publish", filled, 1)
        assert got == want

    @rule(seat=seats)
    def publish_all(self, seat: int) -> None:
        tokens, namespace = self.tokens.get(seat, ([], 0))
        full = min(len(tokens) // SIZE, COLUMNS)
        blocks = np.zeros((COLUMNS, SIZE), np.int32)
        blocks[:full] = np.array(tokens[: full * SIZE], np.int32).reshape(full, SIZE)
        filled = paged.FilledBlocks(
            seat=jnp.full(COLUMNS, seat, jnp.int32),
            column=jnp.arange(COLUMNS, dtype=jnp.int32),
            tokens=jnp.asarray(blocks),
            namespace=jnp.full(COLUMNS, namespace, jnp.int32),
        )
        got, _ = self.call("publish", filled, full)
        assert got
        for column in range(full):
            assert self.model.publish(seat, column, tokens[: (column + 1) * SIZE], namespace)

    @rule(seat=st.integers(-1, SEATS))
    def release(self, seat: int) -> None:
        got, _ = self.call("release", seat)
        assert got == self.model.release(seat)
        self.tokens.pop(seat, None)

    @invariant()
    def same(self) -> None:
        paged.check_invariants(self.state, self.tables)
        assert_same(self.model, self.state, self.tables)
        counts = jax.tree.map(int, self.ops["stats"](self.state))
        assert (counts.num_free, counts.num_cached, counts.num_active) == (
            self.model.num_free,
            self.model.num_cached,
            self.model.num_active,
        )

    def teardown(self) -> None:
        for seat in range(SEATS):
            self.call("release", seat)
        assert int(paged.stats(self.state).num_active) == 0


def machine() -> type[Manager]:
    class Jitted(Manager):
        ops = {  # noqa: RUF012
            "admit": jax.jit(paged.admit),
            "append": jax.jit(partial(paged.append, max_new_blocks=NEW)),
            "publish": jax.jit(paged.publish),
            "release": jax.jit(paged.release),
            "stats": jax.jit(paged.stats),
        }

    return Jitted


RUNS = settings(
    max_examples=int(os.environ.get("OCTAVO_MODEL_RUNS", "60")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_random_operations_mean_the_same() -> None:
    run_state_machine_as_test(machine(), settings=RUNS)


def test_a_constant_hash_changes_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = lambda x: jnp.asarray(x, jnp.uint32) * jnp.uint32(0)  # noqa: E731
    monkeypatch.setattr(hashing, "_mix", zero)
    monkeypatch.setattr(hashing, "_MULTIPLIER", 1)
    jax.clear_caches()
    state = paged.init_cache(BLOCKS, SIZE)
    tokens = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    assert not np.asarray(hashing.chain_hashes(tokens, 5)).any()
    assert int(paged.stats(state).num_free) == BLOCKS - 1
    run_state_machine_as_test(machine(), settings=RUNS)
    jax.clear_caches()
