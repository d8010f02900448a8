"""The block pool: reference counts and the stack of free blocks, as immutable arrays.

Invariants: block 0 is the null block, has no references and is never handed out; a block on the
stack has no references; every operation is all or nothing. A block whose last reference goes
is pushed to the stack unless the caller keeps it (an indexed block stays *cached* instead).

    >>> pool = init_pool(4)
    >>> pool, ids, ok = allocate(pool, count=2, max_count=2)
    >>> [int(i) for i in ids], bool(ok), int(pool.num_free)
    ([1, 2], True, 1)
    >>> pool, ok = decref(pool, ids)
    >>> int(pool.num_free), bool(decref(pool, ids)[1])
    (3, False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from ..pallas_kernels.layout import debug_check


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """Reference counts and free blocks.

    Attributes:
        ref_count: `int32[P]` block-table entries that point at each block.
        free_stack: `int32[P]`; the first `num_free` entries are the free blocks, top last.
        num_free: `int32[]`.
    """

    ref_count: jax.Array
    free_stack: jax.Array
    num_free: jax.Array

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included, P."""
        return self.ref_count.shape[0]


def init_pool(num_blocks: int) -> BlockPool:
    """A pool of `num_blocks` blocks, all free but the null block.

    Raises:
        ValueError: there is no block beside the null block.
    """
    if num_blocks < 2:
        raise ValueError(f"{num_blocks=} must be at least 2: block 0 is the null block")
    # Low ids on top: a pool that is never full touches the least memory.
    stack = jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32)
    return BlockPool(
        ref_count=jnp.zeros(num_blocks, jnp.int32),
        free_stack=stack,
        num_free=jnp.int32(num_blocks - 1),
    )


def allocate(
    pool: BlockPool, count: jax.typing.ArrayLike, max_count: int
) -> tuple[BlockPool, jax.Array, jax.Array]:
    """Take `count` free blocks, each with one reference.

    Args:
        pool: the pool.
        count: `int32[]`, at most `max_count`.
        max_count: static bound.

    Returns:
        `(pool, block_ids int32[max_count], ok bool[])`; ids past `count` are the null block.
        With too few free blocks, or a count outside `[0, max_count]`, ok is False, all ids are
        null and the pool is unchanged.
    """
    count = jnp.asarray(count, jnp.int32)
    ok = (count >= 0) & (count <= jnp.minimum(max_count, pool.num_free))
    count = jnp.where(ok, count, 0)
    position = jnp.arange(max_count, dtype=jnp.int32)
    wanted = position < count
    ids = pool.free_stack[jnp.maximum(pool.num_free - 1 - position, 0)]
    ids = jnp.where(wanted, ids, NULL_BLOCK)
    target = jnp.where(wanted, ids, pool.num_blocks)
    return (
        replace(
            pool,
            ref_count=pool.ref_count.at[target].set(1, mode="drop"),
            num_free=pool.num_free - count,
        ),
        ids,
        ok,
    )


def incref(pool: BlockPool, block_ids: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Add a reference for each entry of `block_ids: int32[n]`; null blocks are padding.

    Returns:
        `(pool, ok bool[])`; with an id outside `[0, P)` ok is False and the pool unchanged. A
        block with no references yet must be indexed (cached): one that is free is not the
        caller's to reference, and `check_invariants` finds it.
    """
    used = block_ids != NULL_BLOCK
    ok = jnp.all(~used | _inside(block_ids, pool.num_blocks))
    debug_check(ok, "incref: a block id is out of range")
    target = jnp.where(used & ok, block_ids, pool.num_blocks)
    return replace(pool, ref_count=pool.ref_count.at[target].add(1, mode="drop")), ok


def decref(
    pool: BlockPool, block_ids: jax.Array, keep: jax.Array | None = None
) -> tuple[BlockPool, jax.Array]:
    """Drop a reference for each entry of `block_ids: int32[n]`; null blocks are padding.

    Args:
        pool: the pool.
        block_ids: an id may stand several times and then loses as many references.
        keep: `bool[P]` blocks that do not become free when their last reference goes, because
            the prefix index holds them; None means none.

    Returns:
        `(pool, ok bool[])`; with an id outside `[0, P)` or more drops than references (a double
        free) ok is False and the pool is unchanged.
    """
    num_blocks = pool.num_blocks
    inside = _inside(block_ids, num_blocks)
    # Sorted, so that repeated ids are seen without an array of the pool's size.
    ids = jnp.sort(jnp.where(inside, block_ids, num_blocks))
    used = ids != num_blocks
    first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])[: ids.shape[0]]
    run = jnp.cumsum(first, dtype=jnp.int32) - 1
    drops = jnp.zeros_like(ids).at[run].add(1)[run]
    safe = jnp.where(used, ids, NULL_BLOCK)
    refs = pool.ref_count[safe]
    ok = jnp.all(inside | (block_ids == NULL_BLOCK)) & jnp.all(~used | (refs >= drops))
    debug_check(ok, "decref: a block id is out of range, or a block is freed twice")
    target = jnp.where(ok, ids, num_blocks)

    free = ok & used & first & (refs == drops)
    if keep is not None:
        free &= ~keep[safe]
    place = pool.num_free + jnp.cumsum(free, dtype=jnp.int32) - 1
    return (
        replace(
            pool,
            ref_count=pool.ref_count.at[target].add(-1, mode="drop"),
            free_stack=pool.free_stack.at[jnp.where(free, place, num_blocks)].set(ids, mode="drop"),
            num_free=pool.num_free + jnp.sum(free, dtype=jnp.int32),
        ),
        ok,
    )


def give_back(pool: BlockPool, block_ids: jax.Array) -> BlockPool:
    """Push blocks `int32[n]` without references on the free stack; null ones, last, are padding."""
    live = block_ids != NULL_BLOCK
    place = pool.num_free + jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    return replace(
        pool,
        free_stack=pool.free_stack.at[jnp.where(live, place, pool.num_blocks)].set(
            block_ids, mode="drop"
        ),
        num_free=pool.num_free + jnp.sum(live, dtype=jnp.int32),
    )


def _inside(block_ids: jax.Array, num_blocks: int) -> jax.Array:
    return (block_ids > NULL_BLOCK) & (block_ids < num_blocks)
