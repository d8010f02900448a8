"""The promises of the block manager that are easier to read as stories than as random runs."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import paged

from .stories import admit, cache_prompt, counts, jitted, publish, story

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def test_the_last_token_is_always_computed() -> None:
    state, tables = story(16)
    prompt = list(range(8))
    state, tables, _ = cache_prompt(state, tables, prompt)
    _, _, same = admit(state, tables, 0, prompt)
    _, _, longer = admit(state, tables, 0, [*prompt, 9])
    assert (int(same.num_cached_tokens), int(longer.num_cached_tokens)) == (7, 8)


def test_a_namespace_sees_nothing_of_another() -> None:
    state, tables = story(16)
    state, tables, _ = cache_prompt(state, tables, list(range(9)), namespace=1)
    for namespace, cached in ((0, 0), (1, 8), (2, 0)):
        _, _, got = admit(state, tables, 0, list(range(9)), namespace)
        assert int(got.num_cached_tokens) == cached


def test_equal_tokens_under_another_parent_are_another_block() -> None:
    state, tables = story(16)
    state, tables, _ = cache_prompt(state, tables, [1, 1, 1, 1, 2, 2, 2, 2])
    _, _, got = admit(state, tables, 0, [9, 9, 9, 9, 2, 2, 2, 2, 0])
    assert int(got.num_cached_tokens) == 0


def test_eviction_takes_the_tail_of_a_chain_first() -> None:
    state, tables = story(4)
    chain = list(range(12))
    state, tables, _ = cache_prompt(state, tables, chain)
    assert counts(state) == (0, 3, 0)
    for kept in (2, 1, 0):
        state, ok = jitted.reserve(state, int(state.pool.num_free) + 1, 1)
        assert ok
        paged.check_invariants(state, tables)
        blocks = jnp.asarray(chain, jnp.int32).reshape(3, 4)
        assert int(jitted.match(state.index, blocks, 3, 0)[1]) == kept


def test_a_full_pool_hits_itself() -> None:
    state, tables = story(4)
    prompt = list(range(12))
    state, tables, _ = cache_prompt(state, tables, prompt)
    state, tables, got = admit(state, tables, 1, prompt)
    assert (bool(got.ok), int(got.num_cached_tokens)) == (True, 11)
    paged.check_invariants(state, tables)


def test_short_prompts_do_not_evict_a_prefix_in_use() -> None:
    state, tables = story(14)
    prefix = list(range(40))
    state, tables, _ = cache_prompt(state, tables, prefix)
    for i in range(100):
        state, tables, cached = cache_prompt(state, tables, [1000 + i] * 3)
        assert cached == 0
        if i % 10 == 0:
            state, tables, cached = cache_prompt(state, tables, [*prefix, i])
            assert cached == 40
    paged.check_invariants(state, tables)


def test_blocks_computed_twice_are_folded_into_one() -> None:
    state, tables = story(16)
    prompt = list(range(8))
    state, tables, _ = admit(state, tables, 0, prompt)
    state, tables, _ = admit(state, tables, 1, prompt)
    assert counts(state)[2] == 4
    state, tables = publish(state, tables, 0, prompt)
    state, tables = publish(state, tables, 1, prompt)
    assert counts(state) == (13, 0, 2)
    np.testing.assert_array_equal(tables.block_ids[0], tables.block_ids[1])
    paged.check_invariants(state, tables)


def test_what_does_not_fit_changes_nothing() -> None:
    state, tables = story(6)
    state, tables, _ = admit(state, tables, 0, list(range(9)))
    before = jax.tree.map(np.asarray, (state, tables))
    refused = [
        admit(state, tables, 1, list(range(20, 32)))[:2],  # three blocks, two are free
        admit(state, tables, 0, [1])[:2],  # the seat is taken
        admit(state, tables, -1, [1])[:2],
        admit(state, tables, 4, [1])[:2],
        jitted.admit(state, tables, 1, jnp.zeros((12, 4), jnp.int32), 0, 0)[:2],
        jitted.admit(state, tables, 1, jnp.zeros((12, 4), jnp.int32), 49, 0)[:2],
        paged.append(state, tables, jnp.array([24, 0, 0, 0], jnp.int32), 8)[:2],
        paged.append(state, tables, jnp.array([16, 0, 0, 0], jnp.int32), 0)[:2],
        jitted.release(state, tables, 1)[:2],
        jitted.release(state, tables, -1)[:2],
    ]
    for after in refused:
        jax.tree.map(np.testing.assert_array_equal, before, after)


POOL_FAULTS = {
    "double-free": lambda pool, ids: paged.decref(paged.decref(pool, ids)[0], ids),
    "twice-in-one-call": lambda pool, ids: paged.decref(pool, jnp.concatenate([ids, ids])),
    "never-taken": lambda pool, ids: paged.decref(pool, jnp.array([7], jnp.int32)),
    "negative": lambda pool, ids: paged.decref(pool, jnp.array([-1], jnp.int32)),
    "past-the-end": lambda pool, ids: paged.decref(pool, jnp.array([8], jnp.int32)),
    "far-past": lambda pool, ids: paged.decref(pool, jnp.array([2**31 - 1], jnp.int32)),
    "incref-negative": lambda pool, ids: paged.incref(pool, jnp.array([-1], jnp.int32)),
    "incref-past": lambda pool, ids: paged.incref(pool, jnp.array([8], jnp.int32)),
}


@pytest.mark.parametrize("name", POOL_FAULTS)
def test_the_pool_refuses_what_it_never_gave(name: str) -> None:
    pool, ids, ok = paged.allocate(paged.init_pool(8), 3, 4)
    assert ok
    changed, ok = POOL_FAULTS[name](pool, ids)
    assert not ok
    if name != "double-free":
        jax.tree.map(np.testing.assert_array_equal, pool, changed)


@pytest.mark.parametrize("count", [-1, 8, 5])
def test_the_pool_gives_all_or_nothing(count: int) -> None:
    pool = paged.init_pool(8)
    after, ids, ok = paged.allocate(pool, count, 4)
    assert not ok and not np.asarray(ids).any()
    jax.tree.map(np.testing.assert_array_equal, pool, after)


def test_an_old_state_is_a_snapshot() -> None:
    state, tables = story(16)
    old = (state, tables)
    state, tables, _ = cache_prompt(state, tables, list(range(8)))
    paged.check_invariants(*old)
    assert counts(old[0]) == (15, 0, 0) and counts(state) == (13, 2, 0)


def test_the_access_clock_survives_its_limit() -> None:
    state, tables = story(8)
    state, tables, _ = cache_prompt(state, tables, list(range(4)))
    clock = jnp.int32((1 << 30) + 5)
    index = state.index
    late = jnp.where(index.indexed, index.last_access + (1 << 30), index.last_access)
    state = _index(state, clock=clock, last_access=late)
    state, tables, _ = cache_prompt(state, tables, [9, 9, 9, 9])
    assert int(state.index.clock) < 1000
    paged.check_invariants(state, tables)
    state, ok = jitted.reserve(state, int(state.pool.num_free) + 1, 1)
    assert ok
    assert int(jitted.match(state.index, jnp.full((1, 4), 9, jnp.int32), 1, 0)[1]) == 1


@pytest.mark.slow
def test_operations_compose_under_scan_and_vmap() -> None:
    state, tables = story(16, columns=4)
    prompts = jax.random.randint(jax.random.key(0), (6, 4, 4), 0, 2)

    def serve(carry, prompt):
        state, tables = carry
        state, tables, got = paged.admit(state, tables, 0, prompt, 16, 0)
        filled = paged.FilledBlocks(
            seat=jnp.zeros(4, jnp.int32),
            column=jnp.arange(4, dtype=jnp.int32),
            tokens=prompt,
            num_tokens=jnp.full(4, 4, jnp.int32),
            namespace=jnp.zeros(4, jnp.int32),
        )
        state, tables, _ = paged.publish(state, tables, filled, 4)
        state, tables, _ = paged.release(state, tables, 0)
        return (state, tables), got.num_cached_tokens

    scan = lambda prompts: jax.lax.scan(serve, (state, tables), prompts)  # noqa: E731
    orders = jnp.stack([prompts, prompts[::-1]])
    (states, all_tables), cached = jax.jit(jax.vmap(scan))(orders)
    for i in range(2):
        (one, one_tables), alone = jax.jit(scan)(orders[i])
        np.testing.assert_array_equal(cached[i], alone)
        got = jax.tree.map(lambda x, i=i: x[i], (states, all_tables))
        jax.tree.map(np.testing.assert_array_equal, got, (one, one_tables))
        paged.check_invariants(one, one_tables)


def test_equal_keys_share_an_id_and_no_field_imitates_another() -> None:
    names = paged.Namespaces()
    base: dict[str, Any] = {"model": "a", "cache_dtype": "float32"}
    keys = [
        paged.NamespaceKey(**base),
        paged.NamespaceKey(**{**base, "model": "b"}),
        paged.NamespaceKey(**{**base, "cache_dtype": "bfloat16"}),
        paged.NamespaceKey(**base, adapter="x"),
        paged.NamespaceKey(**base, adapter="x", adapter_version="1"),
        paged.NamespaceKey(**base, salt="x"),
        paged.NamespaceKey(model="afloat32", cache_dtype=""),
    ]
    ids = [names.id_of(key) for key in keys]
    assert len(set(ids)) == len(keys)
    assert ids == [names.id_of(key) for key in keys]


def test_forgotten_namespaces_never_share_an_id() -> None:
    names = paged.Namespaces(max_keys=2)
    a, b, c = (paged.NamespaceKey(model="m", cache_dtype="float32", salt=s) for s in "abc")
    assert [names.id_of(k) for k in (a, b, a, c, a)] == [0, 1, 0, 2, 0]
    assert names.id_of(b) == 3
    with pytest.raises(ValueError, match="max_keys=0"):
        paged.Namespaces(max_keys=0)


BREAKS = {
    "references": lambda s, t: (_pool(s, ref_count=s.pool.ref_count.at[1].add(1)), t),
    "null": lambda s, t: (_index(s, num_tokens=s.index.num_tokens.at[0].set(4)), t),
    "twice on the free stack": lambda s, t: (
        _pool(s, free_stack=s.pool.free_stack.at[0].set(s.pool.free_stack[1])),
        t,
    ),
    "states": lambda s, t: (_pool(s, num_free=s.pool.num_free - 1), t),
    "orphans": lambda s, t: (_index(s, num_tokens=s.index.num_tokens.at[1].set(0)), t),
    "bucket": lambda s, t: (
        _index(s, by_hash=replace(s.index.by_hash, next=s.index.by_hash.next.at[1].set(1))),
        t,
    ),
    "children": lambda s, t: (
        _index(s, by_parent=replace(s.index.by_parent, head=s.index.by_parent.head * 0)),
        t,
    ),
    "leaf first": lambda s, t: (_index(s, hits=s.index.hits.at[2].set(9)), t),
    "pins": lambda s, t: (_index(s, pin_until=s.index.pin_until.at[1].set(9)), t),
    "hash": lambda s, t: (_index(s, hash=s.index.hash.at[2].add(jnp.uint32(1))), t),
    "tables": lambda s, t: (s, replace(t, num_blocks=t.num_blocks + 1)),
}


def _pool(state, **changes):
    return replace(state, pool=replace(state.pool, **changes))


def _index(state, **changes):
    return replace(state, index=replace(state.index, **changes))


@pytest.mark.parametrize("name", BREAKS)
def test_the_checker_finds_a_broken_state(name: str) -> None:
    state, tables = story(8)
    state, tables, _ = cache_prompt(state, tables, list(range(8)))
    paged.check_invariants(state, tables)
    with pytest.raises(paged.InvariantViolation):
        paged.check_invariants(*BREAKS[name](state, tables))


@pytest.mark.parametrize("module", ["pool", "cache", "sharing"])
def test_the_worked_examples_run(module: str) -> None:
    target = importlib.import_module(f"octavo.paged.{module}")
    names = {name: getattr(paged, name) for name in paged.__all__} | {"jnp": jnp}
    result = doctest.testmod(target, extraglobs=names)
    assert result.attempted and not result.failed
