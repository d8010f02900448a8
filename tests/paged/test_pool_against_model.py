"""Random use of the pool alone means the same as on sets and dictionaries."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo import paged

from .test_against_model import RUNS

BLOCKS, MOST, NULL = 8, 4, 0
ODD = (-1, BLOCKS, 2**31 - 1, -(2**31))

jitted = SimpleNamespace(
    allocate=jax.jit(paged.allocate, static_argnums=2),
    incref=jax.jit(paged.incref),
    decref=jax.jit(paged.decref),
)

several = st.lists(
    st.sampled_from([*range(1, BLOCKS), *range(1, BLOCKS), NULL, *ODD]), min_size=1, max_size=MOST
)


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = paged.init_pool(BLOCKS)
        self.refs = Counter[int]()
        self.kept: set[int] = set()  # without references, and yet not free

    def free(self) -> set[int]:
        return set(range(1, BLOCKS)) - set(+self.refs) - self.kept

    def go_on(self, pool: paged.BlockPool, ok: jax.Array, want: bool) -> None:
        assert bool(ok) == want
        if not want:
            jax.tree.map(np.testing.assert_array_equal, self.pool, pool)
        self.pool = pool

    @rule(count=st.one_of(st.integers(0, BLOCKS), st.sampled_from(ODD)))
    def allocate(self, count: int) -> None:
        free = self.free()
        pool, ids, ok = jitted.allocate(self.pool, count, MOST)
        self.go_on(pool, ok, 0 <= count <= min(MOST, len(free)))
        taken = np.asarray(ids).tolist()
        number = count if ok else 0
        assert taken[number:] == [NULL] * (MOST - number)
        assert len(set(taken[:number])) == number and set(taken[:number]) <= free
        self.refs.update(taken[:number])

    @rule(ids=several)
    def incref(self, ids: list[int]) -> None:
        # A free block is nobody's to reference: the pool cannot tell it from a kept one.
        ids = [i for i in ids if i not in self.free()]
        pool, ok = jitted.incref(self.pool, self.padded(ids))
        want = all(0 <= i < BLOCKS for i in ids)
        self.go_on(pool, ok, want)
        if want:
            used = [i for i in ids if i != NULL]
            self.refs.update(used)
            self.kept -= set(used)

    @rule(ids=several, keep=st.sets(st.integers(1, BLOCKS - 1)))
    def decref(self, ids: list[int], keep: set[int]) -> None:
        mask = jnp.zeros(BLOCKS, bool).at[jnp.array([*keep, *[NULL] * BLOCKS][:BLOCKS])].set(True)
        pool, ok = jitted.decref(self.pool, self.padded(ids), mask)
        drops = Counter(i for i in ids if i != NULL)
        want = all(0 < i < BLOCKS for i in drops) and drops <= self.refs
        self.go_on(pool, ok, want)
        if want:
            self.refs -= drops
            self.kept |= {i for i in drops if not self.refs[i] and i in keep}

    def padded(self, ids: list[int]) -> np.ndarray:
        return np.array([*ids, *[NULL] * MOST][:MOST], np.int32)

    @invariant()
    def means_the_same(self) -> None:
        refs = np.asarray(self.pool.ref_count).tolist()
        assert refs == [self.refs[block] for block in range(BLOCKS)]
        stack = np.asarray(self.pool.free_stack)[: int(self.pool.num_free)].tolist()
        assert sorted(stack) == sorted(self.free())


def test_random_use_of_the_pool_means_the_same() -> None:
    run_state_machine_as_test(Pool, settings=RUNS)
