"""A reset frees what nobody holds, and nothing else."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from octavo.paged import BlockManager, check_invariants, reset_cache

pytestmark = pytest.mark.usefixtures("compiled_quickly")

reset = jax.jit(reset_cache)


@pytest.fixture
def manager() -> BlockManager:
    """One running sequence of five blocks, one pinned prompt of three, four cached blocks more."""
    manager = BlockManager(num_blocks=40, block_size=4, num_seqs=2, blocks_per_seq=8, pin_budget=8)
    ended, running = [*range(100, 112), *range(200, 216)], list(range(20))
    for seat, tokens in enumerate((ended, running)):
        manager.admit(seat, tokens)
        manager.publish(seat, tokens)
    manager.release(0)
    manager.pin(ended[:12])
    return manager


@pytest.mark.parametrize(("keep_pinned", "num_freed"), [(False, 7), (True, 4)])
def test_only_what_is_not_held_goes(manager: BlockManager, keep_pinned: bool, num_freed: int):
    before = manager.stats()
    state, freed = reset(manager.state, keep_pinned=keep_pinned)
    check_invariants(state, manager.tables)
    assert int(freed) == num_freed
    manager.state = state
    after = manager.stats()
    assert int(after.num_active) == int(before.num_active) == 5
    assert int(after.num_cached) == 7 - num_freed
    assert int(after.num_pinned) == (3 if keep_pinned else 0)
    found = manager.admit(0, [*range(100, 112), 1]).num_cached_tokens
    assert found == (12 if keep_pinned else 0)
    manager.release(0)
    # What runs is still shared, and everything can be given out again.
    assert manager.admit(0, [*range(20), 1]).num_cached_tokens == 20
    manager.release(0)
    manager.release(1)
    check_invariants(manager.state, manager.tables)


def test_a_second_reset_finds_nothing(manager: BlockManager):
    state, _ = reset(manager.state)
    again, freed = reset(state)
    assert int(freed) == 0
    same = jax.tree.map(np.array_equal, state.pool, again.pool)
    assert all(jax.tree.leaves(same))
