"""Which cached blocks go first: eviction policies as score functions on arrays.

The blocks with the smallest (priority, score, last access) go. Every score is built of numbers that
never grow from parent to child, so leaves go before their parents without looking at the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .history import History, recall
from .index import PrefixIndex
from .lanes import after, any_lane

POLICIES = ("lru", "lfu", "slru", "cost")

# Of the `cost` policy. Its results hardly depend on them: halved or doubled they move the saved
# work by a percent or two.
_FIRST_INTERVAL = 400.0
_STEP = 0.01
_HALF_LIFE = 16.0  # of a use, in intervals
_LONGEST_INTERVAL = 1e6

_MAX = int(jnp.iinfo(jnp.int32).max)
_ROW = 32  # blocks of the pool whose smallest is looked at first


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EvictionPolicy:
    """A policy as data, so that lanes of one `vmap` can differ in it, and what it has learned.

    Attributes:
        kind: `int32[]` position in `POLICIES`.
        slope: `float32[]` what one block of context adds to the cost of computing a block, in
            units of a first block's cost.
        most: `float32[]` what a block costs at most, in the same unit: what restoring one takes
            where tiers below keep them.
        protected: `int32[]` blocks that `slru` protects at most.
        interval: `float32[]` running median of the time from a block's first use to its second,
            in requests.
        requests: `int32[]` sequences admitted so far: the time of this policy.
    """

    kind: jax.Array
    slope: jax.Array
    most: jax.Array
    protected: jax.Array
    interval: jax.Array
    requests: jax.Array


def eviction_policy(
    name: str = "lru", *, slope: float = 0.0, most: float = math.inf, protected: int = 0
) -> EvictionPolicy:
    """A policy by name.

    * `lru`: least recently used first.
    * `lfu`: least often hit first.
    * `slru`: of two segments; blocks that were hit, the `protected` most recent of them, stay
      longer than the others.
    * `cost`: least worth first. A block is worth (how often it was used, also before it was
      evicted) x (square root of the cost of getting it again), for as long as the time after which
      blocks are typically used a second time; after that 1 / age of it.

    Raises:
        ValueError: the name is unknown, or a number is negative (or 0, for `most`).
    """
    if name not in POLICIES:
        raise ValueError(f"{name=} must be one of {', '.join(POLICIES)}")
    if slope < 0 or protected < 0:
        raise ValueError(f"{slope=} and {protected=} must not be negative")
    if not most > 0:
        raise ValueError(f"{most=} must be positive")
    return EvictionPolicy(
        kind=jnp.int32(POLICIES.index(name)),
        slope=jnp.float32(slope),
        most=jnp.float32(most),
        protected=jnp.int32(protected),
        interval=jnp.float32(_FIRST_INTERVAL),
        requests=jnp.int32(0),
    )


def touch(
    index: PrefixIndex,
    policy: EvictionPolicy,
    paths: jax.Array,
    *,
    hit: jax.typing.ArrayLike = False,
    priority: jax.typing.ArrayLike = 0,
) -> tuple[PrefixIndex, EvictionPolicy]:
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
    depth = (jnp.cumsum(used, axis=1) - 1).astype(jnp.float32)
    # Deepest first, a row after the other: a parent in several rows ends up newer than all.
    order = jnp.cumsum(used.reshape(-1)[::-1].astype(jnp.int32))[::-1].reshape(paths.shape) - 1
    hit = jnp.broadcast_to(jnp.broadcast_to(jnp.asarray(hit), rows)[:, None], paths.shape) & used
    priority = jnp.broadcast_to(jnp.asarray(priority, jnp.int32), rows)[:, None]

    # How often: a use counts half after some intervals without one.
    age, uses = policy.requests - index.last_use[paths], index.uses[paths]
    again = jnp.where(hit, _aged(uses, age, policy.interval) + 1, uses)
    uses = jnp.where(used, again, 0)
    cost = jnp.minimum(1 + policy.slope * depth, policy.most)
    value = jnp.where(used, (uses + 1) * jnp.sqrt(cost), 0)
    # What a block is worth its ancestors are, since it cannot stay without them.
    before = jnp.where(used, index.worth[paths], 0)
    value = jax.lax.cummax(jnp.maximum(value, before), axis=1, reverse=True)
    policy = _learn(policy, age, hit & (index.uses[paths] == 0))

    def shaped(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, paths.shape)

    index = replace(
        index,
        hits=index.hits.at[target].add(hit.astype(jnp.int32), mode="drop"),
        uses=index.uses.at[target].set(uses, mode="drop"),
        worth=index.worth.at[target].max(value, mode="drop"),
        last_use=index.last_use.at[after(target, age)].set(shaped(policy.requests), mode="drop"),
        priority=index.priority.at[target].max(shaped(priority), mode="drop"),
        last_access=index.last_access.at[target].max(index.clock + order, mode="drop"),
        clock=index.clock + jnp.sum(used, dtype=jnp.int32),
    )
    return index, policy


def remember(
    index: PrefixIndex, policy: EvictionPolicy, history: History, block_ids: jax.Array
) -> tuple[PrefixIndex, EvictionPolicy]:
    """Give blocks `int32[n]` that have just been indexed the uses they had before an eviction.

    Null blocks are padding.
    """
    target = jnp.where(block_ids != NULL_BLOCK, block_ids, index.num_tokens.shape[0])
    now = jnp.broadcast_to(policy.requests, block_ids.shape)
    last_use = index.last_use.at[target].set(now, mode="drop")
    if not history.hash.shape[0]:
        uses = index.uses.at[target].set(0, mode="drop")
        return replace(index, uses=uses, last_use=last_use), policy
    place, back = recall(history, index.hash[block_ids])
    back &= block_ids != NULL_BLOCK
    age, before = policy.requests - history.last_use[place], history.uses[place]
    uses = jnp.where(back, _aged(before, age, policy.interval) + 1, 0)
    index = replace(index, uses=index.uses.at[target].set(uses, mode="drop"), last_use=last_use)
    return index, _learn(policy, age, back & (before == 0))


def _aged(uses: jax.Array, age: jax.Array, interval: jax.Array) -> jax.Array:
    return uses * jnp.exp2(-age.astype(jnp.float32) / (_HALF_LIFE * interval))


def _learn(policy: EvictionPolicy, age: jax.Array, second_use: jax.Array) -> EvictionPolicy:
    """Move the median towards the ages `int32[...]` at which blocks were used a second time."""
    side = jnp.sign(age.astype(jnp.float32) - policy.interval)
    pull = jnp.sum(jnp.where(second_use, side, 0))
    factor = jnp.exp(_STEP * jnp.sign(pull) * jnp.sqrt(jnp.abs(pull)))
    interval = jnp.clip(policy.interval * factor, 1, _LONGEST_INTERVAL)
    return replace(policy, interval=interval)


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
    # Kept as an array: fused into each use it would be computed anew there.
    keep = jax.lax.optimization_barrier
    score = keep(_score(index, policy))
    keys = [index.priority, score, index.last_access]
    size = evictable.shape[0]
    if 2 * max_count * _ROW > size:
        return _ids_of(_smallest(keys, evictable, count), max_count, NULL_BLOCK)

    # All victims lie in the `count` rows with the smallest minima: one in another row would come
    # after all of these. So the pool is gone through once and the search is among few.
    *keys, mask = (jnp.pad(x, (0, -size % _ROW)).reshape(-1, _ROW) for x in (*keys, evictable))
    minima, tied = [], mask
    for key in keys:
        minima.append(keep(jnp.min(key, axis=1, initial=_MAX, where=tied)))
        tied &= key == minima[-1][:, None]
    chosen = _smallest(minima, jnp.any(mask, axis=1), count)
    rows = keep(_ids_of(chosen, max_count, 0))
    is_row = jnp.arange(max_count, dtype=jnp.int32) < jnp.sum(chosen, dtype=jnp.int32)
    few = [keep(key[rows].reshape(-1)) for key in keys]
    mask = (mask[rows] & is_row[:, None]).reshape(-1)
    places = _ids_of(_smallest(few, mask, count), max_count, -1)
    ids = rows[places // _ROW] * _ROW + places % _ROW
    return jnp.where(places >= 0, ids, NULL_BLOCK)


def _score(index: PrefixIndex, policy: EvictionPolicy) -> jax.Array:
    """`int32[P]`, not negative."""
    hit = (index.hits > 0) & index.indexed
    excess = jnp.sum(hit, dtype=jnp.int32) - policy.protected
    excess = jnp.where(policy.kind == POLICIES.index("slru"), excess, 0)
    protected = hit & ~_smallest((index.last_access,), hit, excess)
    age = jnp.maximum(policy.requests - index.last_use, 1).astype(jnp.float32)
    worth = index.worth * jnp.minimum(1, policy.interval / age)
    # A float that is not negative orders as its bits do.
    worth = jax.lax.bitcast_convert_type(worth, jnp.int32)
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
        wanted = count - jnp.sum(chosen, dtype=jnp.int32)
        # Where nothing is wanted, or all keys are equal, there is nothing to bisect.
        high = jnp.max(key, initial=0, where=mask & (wanted > 0))
        low = jnp.minimum(jnp.min(key, initial=_MAX, where=mask), high)
        key = jnp.where(mask, key, _MAX)

        def halve(
            bounds: tuple[jax.Array, jax.Array],
            key: jax.Array = key,
            wanted: jax.Array = wanted,
        ) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            enough = jnp.sum(key <= middle, dtype=jnp.int32) >= wanted
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


def _ids_of(mask: jax.Array, max_count: int, fill: int) -> jax.Array:
    """Positions `int32[max_count]` where `mask: bool[n]` holds, `fill` past them."""
    place = running_count(mask) - 1
    ids = jnp.arange(mask.shape[0], dtype=jnp.int32)
    return (
        jnp.full(max_count, fill, jnp.int32)
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
