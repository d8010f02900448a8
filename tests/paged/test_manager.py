"""The host's wrapper: what cannot be done raises by name and changes nothing."""

from __future__ import annotations

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo import paged
from octavo.pallas_kernels import debug_checks

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def manager() -> paged.BlockManager:
    """Ten blocks: six held by seat 0, of which four can be found."""
    manager = paged.BlockManager(
        num_blocks=11, block_size=4, num_seqs=3, blocks_per_seq=8, pin_budget=2
    )
    manager.admit(0, list(range(24)))
    manager.publish(0, list(range(16)))
    return manager


FAULTS = {
    "admit-taken": (lambda m: m.admit(0, [1]), ValueError, "seat=0 holds a sequence"),
    "admit-nowhere": (lambda m: m.admit(3, [1]), ValueError, r"seat=3 must be in \[0, 3\)"),
    "admit-negative": (lambda m: m.admit(-1, [1]), ValueError, "seat=-1"),
    "admit-empty": (lambda m: m.admit(1, []), ValueError, r"must be in \[1, 32\]"),
    "admit-too-long": (lambda m: m.admit(1, [1] * 33), ValueError, "33"),
    "admit-full": (lambda m: m.admit(1, [7] * 20), paged.OutOfBlocks, "4 blocks are free"),
    "append-dead": (lambda m: m.append({1: 3}), ValueError, "seat=1 holds no sequence"),
    "append-too-long": (lambda m: m.append({0: 33}), ValueError, "length=33"),
    "fork-dead": (lambda m: m.fork(1, 2), ValueError, "seat=1 holds no sequence"),
    "fork-onto": (lambda m: m.fork(0, 0), ValueError, "release it first"),
    "publish-past": (lambda m: m.publish(0, [1] * 28), ValueError, "room for 24"),
    "cow-nowhere": (lambda m: m.copy_on_write(0, 24), ValueError, r"in \[0, 24\)"),
    "cow-in-front": (lambda m: m.copy_on_write(0, 5), ValueError, "truncate first"),
    "truncate-longer": (lambda m: m.truncate(0, 25), ValueError, "num_tokens=25"),
    "release-twice": (lambda m: m.release(2), ValueError, "holds no sequence"),
    "pin-too-much": (lambda m: m.pin(list(range(12))), paged.PinBudgetExceeded, "budget of 2"),
    "pin-dead": (lambda m: m.pin_sequence(1), ValueError, "holds no sequence"),
    "pin-namespace": (lambda m: m.pin_namespace(0), paged.PinBudgetExceeded, "budget"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_done_is_named_and_changes_nothing(manager, name: str) -> None:
    call, error, message = FAULTS[name]
    before = jax.tree.map(np.array, (manager.state, manager.tables))
    with pytest.raises(error, match=message):
        call(manager)
    after = (manager.state, manager.tables)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    manager.check_invariants()


def test_pins_stay_and_never_keep_the_longest_sequence_out() -> None:
    manager = paged.BlockManager(
        num_blocks=11, block_size=4, num_seqs=2, blocks_per_seq=8, pin_budget=2
    )
    manager.admit(0, list(range(16)))
    manager.publish(0, list(range(16)))
    assert manager.pin(list(range(8)), until=100) == 2
    manager.release(0)
    manager.admit(0, [99] * 32)
    assert manager.explain([*range(16), 0]).num_cached_tokens == 8
    with pytest.raises(paged.OutOfBlocks, match="2 pinned"):
        manager.admit(1, [98])
    # The pin ends, and the blocks can go.
    manager.acting(now=100)
    manager.admit(1, [98])
    assert manager.explain([*range(16), 0]).num_cached_tokens == 4
    manager.check_invariants()


def test_a_budget_that_could_keep_the_longest_sequence_out_is_refused() -> None:
    with pytest.raises(ValueError, match="pin_budget=3 must be at most"):
        paged.BlockManager(num_blocks=11, block_size=4, num_seqs=2, blocks_per_seq=8, pin_budget=3)


def test_calls_overwrite_the_state_they_are_given() -> None:
    manager = paged.BlockManager(num_blocks=8, block_size=4, num_seqs=2, blocks_per_seq=4)
    old = manager.state
    manager.admit(0, [1, 2, 3])
    assert old.pool.ref_count.is_deleted()


def test_a_block_is_never_published_under_a_second_name() -> None:
    manager = paged.BlockManager(num_blocks=8, block_size=4, num_seqs=2, blocks_per_seq=4)
    manager.admit(0, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.publish(0, [1, 2])
    for tokens, namespace in (([9, 9, 9], 0), ([1, 2, 3, 4], 1)):
        with pytest.raises(ValueError, match="other tokens or in another namespace"):
            manager.publish(0, tokens, namespace=namespace)
    manager.publish(0, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="other tokens"):
        manager.publish(0, [1, 2, 3, 4, 5, 6, 7, 8], namespace=1)
    manager.check_invariants()


def test_two_managers_can_have_one_policy() -> None:
    policy = paged.eviction_policy("lfu")
    for _ in range(2):
        manager = paged.BlockManager(
            num_blocks=8, block_size=4, num_seqs=2, blocks_per_seq=4, policy=policy
        )
        manager.admit(0, [1, 2, 3])


BAD = {
    "double free": (
        lambda: paged.decref(paged.init_pool(8), jnp.array([3], jnp.int32)),
        "freed twice",
    ),
    "out of range": (
        lambda: paged.incref(paged.init_pool(8), jnp.array([-1], jnp.int32)),
        "out of range",
    ),
    "dead fork": (
        lambda: paged.fork(paged.init_cache(8, 4), paged.init_tables(2, 2), 0, 1),
        "source empty",
    ),
    "dead release": (
        lambda: paged.release(paged.init_cache(8, 4), paged.init_tables(2, 2), 0),
        "truncate",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_debug_mode_reports_what_is_only_refused_otherwise(name: str) -> None:
    call, message = BAD[name]
    with debug_checks(True):
        error, _ = checkify.checkify(jax.jit(call))()
    assert message in (error.get() or "")
    assert not checkify.checkify(jax.jit(lambda: call()))()[0].get()


def test_the_worked_example_runs() -> None:
    result = doctest.testmod(importlib.import_module("octavo.paged.manager"))
    assert result.attempted and not result.failed
