"""A hash table of linked lists of blocks: it can overfill and become slow, never lose a block.

All operations are vectorised over blocks; a list is walked in as many rounds as it is long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .hashing import bucket_of
from .lanes import after, any_lane
from .order import order_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The lists.

    Attributes:
        head: `int32[buckets]` first block of each bucket, null if empty.
        next: `int32[P]` next block of the same bucket, null at the end.
    """

    head: jax.Array
    next: jax.Array


def init_buckets(num_blocks: int) -> Buckets:
    """Empty lists for blocks `[0, num_blocks)`, two to four buckets for each."""
    return Buckets(
        head=jnp.full(1 << (2 * num_blocks - 1).bit_length(), NULL_BLOCK, jnp.int32),
        next=jnp.full(num_blocks, NULL_BLOCK, jnp.int32),
    )


def find(
    buckets: Buckets, keys: jax.Array, is_wanted: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The first block in the bucket of each key that is wanted, or the null block.

    Args:
        buckets: the lists.
        keys: `uint32[n]`.
        is_wanted: from `int32[n]` blocks, one for each key, to `bool[n]`.

    Returns:
        `int32[n]`.
    """

    def unwanted(block: jax.Array) -> jax.Array:
        return (block != NULL_BLOCK) & ~is_wanted(block)

    return jax.lax.while_loop(
        lambda block: any_lane(jnp.any(unwanted(block))),
        lambda block: jnp.where(unwanted(block), buckets.next[block], block),
        first_block(buckets, keys),
    )


def first_block(buckets: Buckets, keys: jax.Array) -> jax.Array:
    """The head `int32[...]` of the bucket of each key `uint32[...]`."""
    return buckets.head[bucket_of(keys, buckets.head.shape[0])]


def insert(buckets: Buckets, block_ids: jax.Array, keys: jax.Array) -> Buckets:
    """Put distinct blocks `int32[n]` that are in no list in front; null blocks are padding."""
    num_buckets, num_blocks = buckets.head.shape[0], buckets.next.shape[0]
    bucket = jnp.where(block_ids != NULL_BLOCK, bucket_of(keys, num_buckets), num_buckets)
    # Those of one bucket side by side: each is followed by its neighbour, the last by the list.
    order = order_of(bucket, num_buckets + 1)
    ids, bucket = block_ids[order], bucket[order]
    new_list = bucket[1:] != bucket[:-1]
    edge = jnp.ones(1, bool)
    is_first = jnp.concatenate([edge, new_list])
    is_last = jnp.concatenate([new_list, edge])
    old_head = buckets.head[jnp.minimum(bucket, num_buckets - 1)]
    follower = jnp.where(is_last, old_head, jnp.roll(ids, -1))
    front = after(jnp.where(is_first, bucket, num_buckets), old_head)
    return Buckets(
        head=buckets.head.at[front].set(ids, mode="drop"),
        next=buckets.next.at[jnp.where(ids != NULL_BLOCK, ids, num_blocks)].set(
            follower, mode="drop"
        ),
    )


def remove(buckets: Buckets, block_ids: jax.Array, keys: jax.Array) -> Buckets:
    """Take blocks `int32[n]` out of the buckets of their keys `uint32[n]`; null is padding."""
    num_buckets, num_blocks = buckets.head.shape[0], buckets.next.shape[0]
    live = block_ids != NULL_BLOCK
    own = jnp.where(live, block_ids, num_blocks)
    bucket = bucket_of(keys, num_buckets)
    # A complemented link marks a block that goes, so that no array of the pool's size is made.
    marked = buckets.next.at[own].set(~buckets.next[block_ids], mode="drop")
    none = jnp.full_like(block_ids, NULL_BLOCK)

    def relink(
        head: jax.Array, following: jax.Array, before: jax.Array, block: jax.Array, where: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        at_head = where & (before == NULL_BLOCK)
        head = head.at[jnp.where(at_head, bucket, num_buckets)].set(block, mode="drop")
        at_block = where & (before != NULL_BLOCK)
        return head, following.at[jnp.where(at_block, before, num_blocks)].set(block, mode="drop")

    # Blocks of one bucket walk it together and write the same.
    def step(lists: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        head, following, before, block = lists
        link = following[block]
        stays = (block != NULL_BLOCK) & (link >= 0)
        head, following = relink(head, following, before, block, stays)
        return head, following, jnp.where(stays, block, before), jnp.where(link < 0, ~link, link)

    start = jnp.where(live, buckets.head[bucket], NULL_BLOCK)
    head, following, last, _ = jax.lax.while_loop(
        lambda lists: any_lane(jnp.any(lists[3] != NULL_BLOCK)),
        step,
        (buckets.head, marked, none, start),
    )
    head, following = relink(head, following, last, none, live)
    return Buckets(head=head, next=following.at[own].set(NULL_BLOCK, mode="drop"))
