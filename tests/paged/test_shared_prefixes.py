"""Grouping a batch by shared leading blocks, against a plain-Python greedy search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.paged import shared_prefixes
from octavo.pallas_kernels import SharedPrefixes

B = 4


def groups_of(prefixes: SharedPrefixes) -> list[tuple[int, set[int], int]]:
    """(leader, members, shared blocks) of every group in use."""
    start = np.asarray(prefixes.group_start)
    order, leader = np.asarray(prefixes.order), np.asarray(prefixes.leader)
    blocks = np.asarray(prefixes.group_blocks)
    return [
        (int(leader[g]), {int(s) for s in order[start[g] : start[g + 1]]}, int(blocks[g]))
        for g in range(len(leader))
        if start[g] < start[g + 1]
    ]


def greedy(tables: np.ndarray, lens: np.ndarray, least: int) -> list[tuple[int, set[int], int]]:
    def common(a: int, b: int) -> int:
        depth = 0
        while (depth + 1) * B < min(lens[a], lens[b]) and tables[a, depth] == tables[b, depth]:
            depth += 1
        return depth

    waiting, groups = list(range(len(lens))), []
    while waiting:
        leader, others = waiting[0], waiting[1:]
        best, blocks = 0, 0
        for depth in sorted({common(leader, o) for o in others}, reverse=True):
            saved = depth * sum(common(leader, o) >= depth for o in others)
            if saved > best:
                best, blocks = saved, depth
        members = {leader}
        if best >= least:
            members |= {o for o in others if common(leader, o) >= blocks}
            groups.append((leader, members, blocks))
        waiting = [s for s in waiting if s not in members]
    return groups


def random_batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tables that branch off one another at random depths, as prefix sharing makes them."""
    num_seqs, width = rng.integers(1, 9), 7
    tables = rng.integers(1, 1000, size=(num_seqs, width)).astype(np.int32)
    for s in range(1, num_seqs):
        if rng.random() < 0.7:
            depth = rng.integers(0, width + 1)
            tables[s, :depth] = tables[rng.integers(s), :depth]
    lens = rng.integers(0, width * B + 1, size=num_seqs).astype(np.int32)
    return tables, lens


@pytest.mark.parametrize("least", [1, 4])
def test_groups_are_those_of_a_greedy_search(least: int) -> None:
    find = jax.jit(shared_prefixes, static_argnames=("block_size", "min_saved_blocks"))
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        tables, lens = random_batch(rng)
        padded = np.pad(tables, ((0, 8 - len(tables)), (0, 0)), constant_values=5)
        padded_lens = np.pad(lens, (0, 8 - len(lens)))
        prefixes = find(padded, padded_lens, block_size=B, min_saved_blocks=least)
        groups = groups_of(prefixes)
        assert groups == greedy(tables, lens, least)
        found += len(groups)
        assert sorted(np.asarray(prefixes.order)) == list(range(8))
        own = {s: blocks for _, members, blocks in groups for s in members}
        assert list(np.asarray(prefixes.num_blocks)) == [own.get(s, 0) for s in range(8)]
    assert found > 50


def test_a_shared_block_is_full_and_not_all_of_a_context() -> None:
    tables = jnp.array([[1, 2, 3], [1, 2, 3]], jnp.int32)
    for length, blocks in ((3 * B, 2), (2 * B + 1, 2), (2 * B, 1), (B, 0), (1, 0), (0, 0)):
        lens = jnp.array([3 * B, length], jnp.int32)
        groups = groups_of(shared_prefixes(tables, lens, B))
        assert groups == ([(0, {0, 1}, blocks)] if blocks else [])


def test_equal_blocks_after_unequal_ones_are_not_a_prefix() -> None:
    tables = jnp.array([[1, 2, 3, 4], [1, 9, 3, 4], [8, 2, 3, 4]], jnp.int32)
    lens = jnp.full(3, 4 * B, jnp.int32)
    assert groups_of(shared_prefixes(tables, lens, B)) == [(0, {0, 1}, 1)]


def test_many_with_a_short_prefix_beat_two_with_a_long_one() -> None:
    tables = np.arange(40, dtype=np.int32).reshape(4, 10) + 1
    tables[:, :3] = tables[0, :3]
    tables[1, :6] = tables[0, :6]
    lens = jnp.full(4, 10 * B, jnp.int32)
    assert groups_of(shared_prefixes(jnp.asarray(tables), lens, B)) == [(0, {0, 1, 2, 3}, 3)]
    tables[1, :9] = tables[0, :9]
    groups = groups_of(shared_prefixes(jnp.asarray(tables), lens, B))
    assert groups == [(0, {0, 1}, 9), (2, {2, 3}, 3)]


def test_bad_arguments_are_named() -> None:
    tables, lens = jnp.ones((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match=r"block_tables.shape"):
        shared_prefixes(tables[0], lens, B)
    with pytest.raises(ValueError, match="min_saved_blocks=0"):
        shared_prefixes(tables, lens, B, min_saved_blocks=0)
