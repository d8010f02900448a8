"""The prefix index: full blocks found by namespace, parent and tokens, on immutable arrays.

The index is a forest. A block's parent is the block before it in its sequence (the null block
for a first one), and (namespace, parent, tokens) names at most one block. Blocks are found
through a hash table of linked lists, so that it can overfill but never lose a block.

`last_access` is unique per block and, along any path, larger at the parent than at the child:
a touch counts down from the root. So the least recently used block without references is a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from . import hashing

# Past this access times are replaced by ranks, long before int32 would overflow.
_CLOCK_LIMIT = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefixIndex:
    """Which full blocks are cached for reuse.

    Attributes:
        indexed: `bool[P]`.
        tokens: `int32[P, B]` of each indexed block.
        parent: `int32[P]`; the null block for the first block of a sequence.
        namespace: `int32[P]`, see `Namespaces`.
        hash: `uint32[P]`.
        last_access: `int32[P]`, unique among indexed blocks.
        clock: `int32[]`, larger than every `last_access`.
        bucket_head: `int32[buckets]` first block of each bucket, null if empty.
        bucket_next: `int32[P]` next block of the same bucket, null at the end.
    """

    indexed: jax.Array
    tokens: jax.Array
    parent: jax.Array
    namespace: jax.Array
    hash: jax.Array
    last_access: jax.Array
    clock: jax.Array
    bucket_head: jax.Array
    bucket_next: jax.Array

    @property
    def block_size(self) -> int:
        """Tokens per block, B."""
        return self.tokens.shape[1]


def init_index(num_blocks: int, block_size: int) -> PrefixIndex:
    """An empty index over a pool of `num_blocks` blocks of `block_size` tokens."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")
    buckets = 1 << (2 * num_blocks - 1).bit_length()
    return PrefixIndex(
        indexed=jnp.zeros(num_blocks, bool),
        tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
        parent=jnp.zeros(num_blocks, jnp.int32),
        namespace=jnp.zeros(num_blocks, jnp.int32),
        hash=jnp.zeros(num_blocks, jnp.uint32),
        last_access=jnp.zeros(num_blocks, jnp.int32),
        clock=jnp.int32(1),
        bucket_head=jnp.full(buckets, NULL_BLOCK, jnp.int32),
        bucket_next=jnp.full(num_blocks, NULL_BLOCK, jnp.int32),
    )


def match(
    index: PrefixIndex,
    tokens: jax.Array,
    num_blocks: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Find the longest indexed prefix of a token sequence; nothing is changed.

    Args:
        index: the index.
        tokens: `int32[n, B]`, the sequence cut into blocks.
        num_blocks: `int32[]` full blocks to look for, at most n.
        namespace: `int32[]`.

    Returns:
        `(block_ids int32[n], num_matched int32[])`; ids past `num_matched` are null.
    """
    count = tokens.shape[0]
    if count == 0:
        return jnp.zeros(0, jnp.int32), jnp.int32(0)
    num_blocks = jnp.minimum(jnp.asarray(num_blocks, jnp.int32), count)
    namespace = jnp.asarray(namespace, jnp.int32)
    hashes = hashing.chain_hashes(tokens, namespace)
    heads = index.bucket_head[hashing.bucket_of(hashes, index.bucket_head.shape[0])]
    position = jnp.arange(count, dtype=jnp.int32)

    def wrong(block: jax.Array) -> jax.Array:
        return (block != NULL_BLOCK) & (index.hash[block] != hashes)

    named = jax.lax.while_loop(
        lambda block: jnp.any(wrong(block)),
        lambda block: jnp.where(wrong(block), index.bucket_next[block], block),
        jnp.where(position < num_blocks, heads, NULL_BLOCK),
    )
    before = jnp.concatenate([jnp.full(1, NULL_BLOCK, jnp.int32), named[:-1]])
    hit = _is_block(index, named, namespace, before, tokens)
    fast = jnp.sum(jnp.cumprod(hit.astype(jnp.int32)), dtype=jnp.int32)

    # The hash named a block that tokens or parent refuse: the right one may stand behind it.
    stuck = (fast < num_blocks) & (named[jnp.minimum(fast, count - 1)] != NULL_BLOCK)

    def exact(_: Any) -> tuple[jax.Array, jax.Array]:
        def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i, parent, ids, _ = state
            block = find_block(index, heads[i], namespace, parent, tokens[i])
            found = block != NULL_BLOCK
            return i + found.astype(jnp.int32), block, ids.at[i].set(block), found

        parent = jnp.where(fast > 0, named[jnp.maximum(fast - 1, 0)], NULL_BLOCK)
        state = (fast, parent, named, jnp.bool_(True))
        i, _, ids, _ = jax.lax.while_loop(lambda s: s[3] & (s[0] < num_blocks), step, state)
        return ids, i

    ids, matched = jax.lax.cond(stuck, exact, lambda _: (named, fast), None)
    return jnp.where(position < matched, ids, NULL_BLOCK), matched


def find_block(
    index: PrefixIndex,
    head: jax.Array,
    namespace: jax.Array,
    parent: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """The indexed block `int32[]` with this namespace, parent and tokens in the bucket that
    starts at `head`, or the null block."""

    def other(block: jax.Array) -> jax.Array:
        return (block != NULL_BLOCK) & ~_is_block(index, block, namespace, parent, tokens)

    return jax.lax.while_loop(other, lambda block: index.bucket_next[block], head)


def insert_block(
    index: PrefixIndex,
    block: jax.Array,
    *,
    block_hash: jax.Array,
    namespace: jax.Array,
    parent: jax.Array,
    tokens: jax.Array,
    last_access: jax.Array,
) -> PrefixIndex:
    """Index one block; a block outside `[0, P)` is dropped, so that a caller can mask it."""

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[block].set(value, mode="drop")

    bucket = hashing.bucket_of(block_hash, index.bucket_head.shape[0])
    live = block < index.indexed.shape[0]
    masked = jnp.where(live, bucket, index.bucket_head.shape[0])
    return replace(
        index,
        indexed=put(index.indexed, jnp.bool_(True)),
        tokens=put(index.tokens, tokens),
        parent=put(index.parent, parent),
        namespace=put(index.namespace, namespace),
        hash=put(index.hash, block_hash),
        last_access=put(index.last_access, last_access),
        bucket_next=put(index.bucket_next, index.bucket_head[bucket]),
        bucket_head=index.bucket_head.at[masked].set(block, mode="drop"),
    )


def touch(index: PrefixIndex, block_ids: jax.Array) -> PrefixIndex:
    """Mark a path as used now.

    Args:
        index: the index.
        block_ids: `int32[n]` from the root down; null and unindexed blocks are passed over.
    """
    count = block_ids.shape[0]
    used = (block_ids != NULL_BLOCK) & index.indexed[block_ids]
    target = jnp.where(used, block_ids, index.indexed.shape[0])
    when = index.clock + count - 1 - jnp.arange(count, dtype=jnp.int32)
    return replace(
        index,
        last_access=index.last_access.at[target].set(when, mode="drop"),
        clock=index.clock + count,
    )


def evict(
    index: PrefixIndex, evictable: jax.Array, count: jax.typing.ArrayLike
) -> tuple[PrefixIndex, jax.Array]:
    """Take the `count` least recently used evictable blocks out of the index, leaves first.

    Args:
        index: the index.
        evictable: `bool[P]`; with a block, all its descendants must be evictable (a block in
            use keeps its ancestors in use).
        count: `int32[]`; all evictable blocks go when there are fewer.

    Returns:
        `(index, victims bool[P])`.
    """
    evictable &= index.indexed
    count = jnp.minimum(jnp.asarray(count, jnp.int32), jnp.sum(evictable, dtype=jnp.int32))

    # Bisection for the smallest time up to which `count` blocks lie: access times are unique,
    # and 31 passes over the pool are cheaper than a sort of it.
    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(evictable & (index.last_access <= middle), dtype=jnp.int32) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    _, newest = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), index.clock))
    victims = evictable & (index.last_access <= newest) & (count > 0)
    return _unlink(index, victims), victims


def _unlink(index: PrefixIndex, victims: jax.Array) -> PrefixIndex:
    # Every list skips its victims at once; a run of victims takes as many rounds.
    def skip(lists: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        heads, nexts = lists
        return (
            jnp.where(victims[heads], nexts[heads], heads),
            jnp.where(victims[nexts], nexts[nexts], nexts),
        )

    def pending(lists: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(victims[lists[0]]) | jnp.any(victims[lists[1]])

    heads, nexts = jax.lax.while_loop(pending, skip, (index.bucket_head, index.bucket_next))
    return replace(
        index,
        indexed=index.indexed & ~victims,
        bucket_head=heads,
        bucket_next=jnp.where(victims, NULL_BLOCK, nexts),
    )


def _is_block(
    index: PrefixIndex,
    block: jax.Array,
    namespace: jax.Array,
    parent: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    return (
        (block != NULL_BLOCK)
        & (index.namespace[block] == namespace)
        & (index.parent[block] == parent)
        & jnp.all(index.tokens[block] == tokens, axis=-1)
    )


def limit_clock(index: PrefixIndex) -> PrefixIndex:
    """Replace access times by their ranks when the clock has run far; order is kept."""
    return jax.lax.cond(index.clock >= _CLOCK_LIMIT, _rank_clock, lambda x: x, index)


def _rank_clock(index: PrefixIndex) -> PrefixIndex:
    order = jnp.argsort(jnp.where(index.indexed, index.last_access, 0))
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    return replace(
        index,
        last_access=jnp.where(index.indexed, rank.astype(jnp.int32) + 1, 0),
        clock=jnp.int32(order.shape[0] + 1),
    )
