"""Which cached blocks go first: eviction policies as score functions on arrays.

The blocks with the smallest (priority, score, last access) go. Every score is built of numbers that
never grow from parent to child, so leaves go before their parents without looking at the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .index import PrefixIndex
from .lanes import any_lane

POLICIES = ("lru", "lfu", "slru", "cost")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EvictionPolicy:
    """A policy as data, so that lanes of one `vmap` can differ in it.

    Attributes:
        kind: `int32[]` position in `POLICIES`.
        slope: `float32[]` what one block of context adds to the cost of computing a block, in
            units of a first block's cost.
        protected: `int32[]` blocks that `slru` protects at most.
        inflation: `float32[]` largest `worth` evicted so far: what is worth less was not used
            since, so newer blocks start from here (greedy-dual).
    """

    kind: jax.Array
    slope: jax.Array
    protected: jax.Array
    inflation: jax.Array


def eviction_policy(name: str = "lru", *, slope: float = 0.0, protected: int = 0) -> EvictionPolicy:
    """A policy by name.

    * `lru`: least recently used first.
    * `lfu`: least often hit first.
    * `slru`: of two segments; blocks that were hit, the `protected` most recent of them, stay
      longer than the others.
    * `cost`: expected penalty of a miss first, a greedy-dual score: hits x cost of computing the
      block again, aged.

    Raises:
        ValueError: the name is unknown, or a number is negative.
    """
    if name not in POLICIES:
        raise ValueError(f"{name=} must be one of {', '.join(POLICIES)}")
    if slope < 0 or protected < 0:
        raise ValueError(f"{slope=} and {protected=} must not be negative")
    return EvictionPolicy(
        kind=jnp.int32(POLICIES.index(name)),
        slope=jnp.float32(slope),
        protected=jnp.int32(protected),
        inflation=jnp.float32(0),
    )


def touch(
    index: PrefixIndex,
    policy: EvictionPolicy,
    paths: jax.Array,
    *,
    hit: jax.typing.ArrayLike = False,
    priority: jax.typing.ArrayLike = 0,
) -> PrefixIndex:
    """Mark paths as used now.

    Args:
        index: the index.
        policy: what a block is worth.
        paths: `int32[R, n]` blocks from the root down; null and unindexed ones are passed over.
        hit: `bool[]` or `bool[R]`, whether the use counts as a hit.
        priority: `int32[]` or `int32[R]` retention priority of the user.
    """
    num_blocks = index.num_tokens.shape[0]
    rows = paths.shape[0]
    used = (paths != NULL_BLOCK) & (index.num_tokens[paths] > 0)
    target = jnp.where(used, paths, num_blocks)
    depth = jnp.sum(used, axis=1, dtype=jnp.int32)[:, None]
    # Deepest first, a row after the other: a parent in several rows ends up newer than all.
    order = jnp.cumsum(used.reshape(-1)[::-1].astype(jnp.int32))[::-1].reshape(paths.shape) - 1
    hit = jnp.broadcast_to(jnp.asarray(hit, jnp.int32), rows)[:, None]
    priority = jnp.broadcast_to(jnp.asarray(priority, jnp.int32), rows)[:, None]

    hits = index.hits.at[target].add(jnp.broadcast_to(hit, paths.shape), mode="drop")
    # The deepest of a path costs most; its ancestors stay as long as it does.
    deepest = 1 + policy.slope * jnp.maximum(depth - 1, 0).astype(jnp.float32)
    cost = index.cost.at[target].max(jnp.broadcast_to(deepest, paths.shape), mode="drop")
    worth = policy.inflation + (hits[paths] + 1).astype(jnp.float32) * cost[paths]
    return replace(
        index,
        hits=hits,
        cost=cost,
        worth=index.worth.at[target].max(worth, mode="drop"),
        priority=index.priority.at[target].max(
            jnp.broadcast_to(priority, paths.shape), mode="drop"
        ),
        last_access=index.last_access.at[target].max(index.clock + order, mode="drop"),
        clock=index.clock + jnp.sum(used, dtype=jnp.int32),
    )


def select_victims(
    index: PrefixIndex,
    policy: EvictionPolicy,
    evictable: jax.Array,
    count: jax.Array,
    max_count: int,
) -> jax.Array:
    """The blocks to evict first.

    Args:
        index: the index; it is not changed.
        policy: the order.
        evictable: `bool[P]`; with a block, all its indexed descendants.
        count: `int32[]` how many, at most `max_count` and as many as are evictable.
        max_count: static.

    Returns:
        `int32[max_count]`, null past `count`.
    """
    keys = (index.priority, _score(index, policy), index.last_access)
    return _ids_of(_smallest(keys, evictable, count), max_count)


def _score(index: PrefixIndex, policy: EvictionPolicy) -> jax.Array:
    """`int32[P]`, not negative."""
    hit = (index.hits > 0) & index.indexed
    protected = hit & ~_smallest(
        (index.last_access,), hit, jnp.sum(hit, dtype=jnp.int32) - policy.protected
    )
    # A float that is not negative orders as its bits do.
    worth = jax.lax.bitcast_convert_type(index.worth, jnp.int32)
    zero = jnp.zeros_like(index.hits)
    scores = (zero, index.hits, protected.astype(jnp.int32), worth)
    return jax.lax.select_n(policy.kind, *scores)


def _smallest(keys: Sequence[jax.Array], mask: jax.Array, count: jax.Array) -> jax.Array:
    """The `count` entries of `mask: bool[P]` with the smallest keys `int32[P]`, none negative.

    Bisection for the bound of each key in turn: some twenty passes over the pool are cheaper than
    a sort of it. Entries that tie on all keys go together or not at all.
    """
    chosen = jnp.zeros_like(mask)
    for key in keys:
        # Where all keys are equal there is nothing to bisect.
        low = jnp.min(jnp.where(mask, key, jnp.iinfo(jnp.int32).max))
        high = jnp.max(jnp.where(mask, key, 0))
        low = jnp.minimum(low, high)
        wanted = count - jnp.sum(chosen, dtype=jnp.int32)

        def halve(
            bounds: tuple[jax.Array, jax.Array],
            key: jax.Array = key,
            mask: jax.Array = mask,
            wanted: jax.Array = wanted,
        ) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            enough = jnp.sum(mask & (key <= middle), dtype=jnp.int32) >= wanted
            open_ = low < high
            return (
                jnp.where(open_ & ~enough, middle + 1, low),
                jnp.where(open_ & enough, middle, high),
            )

        bound, _ = jax.lax.while_loop(lambda b: any_lane(b[0] < b[1]), halve, (low, high))
        chosen |= mask & (key < bound) & (wanted > 0)
        mask &= key == bound
    left = count - jnp.sum(chosen, dtype=jnp.int32)
    return chosen | (mask & (left > 0))


def _ids_of(mask: jax.Array, max_count: int) -> jax.Array:
    """Positions `int32[max_count]` where `mask: bool[P]` holds, null past them."""
    place = running_count(mask) - 1
    ids = jnp.arange(mask.shape[0], dtype=jnp.int32)
    return (
        jnp.full(max_count, NULL_BLOCK, jnp.int32)
        .at[jnp.where(mask, place, max_count)]
        .set(ids, mode="drop")
    )


def running_count(mask: jax.Array) -> jax.Array:
    """`int32[P]` how many of `mask: bool[P]` hold up to and including each place."""
    # Columns summed in a loop over rows: XLA's cumsum takes ten times as long on CPU.
    width = 512
    size = mask.shape[0]
    if size < 4 * width:
        return jnp.cumsum(mask, dtype=jnp.int32)
    rows = jnp.pad(mask, (0, -size % width)).reshape(-1, width).astype(jnp.int32)
    add: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    add = lambda total, column: (total + column, total + column)  # noqa: E731
    totals, within = jax.lax.scan(add, jnp.zeros(rows.shape[0], jnp.int32), rows.T)
    before = jnp.cumsum(totals, dtype=jnp.int32) - totals
    return (within.T + before[:, None]).reshape(-1)[:size]
