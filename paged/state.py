"""The state of the block manager: pool, index, policy and counters, as one frozen pytree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from .eviction import EvictionPolicy, eviction_policy
from .history import History, init_history
from .index import PrefixIndex, init_index
from .pool import BlockPool, init_pool

FOREVER = int(jnp.iinfo(jnp.int32).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Counters:
    """Tokens counted once per request, each as `uint32[2]` (low and high word).

    Attributes:
        queries: prompt tokens looked up.
        hits: of those, tokens found.
    """

    queries: jax.Array
    hits: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CacheState:
    """Everything but the tables.

    Attributes:
        pool: references and free blocks.
        index: what is cached for reuse.
        policy: which cached blocks go first.
        history: what was evicted.
        counters: tokens looked up and found.
        pin_budget: `int32[]` blocks that may be pinned at once.
        now: `int32[]` the caller's time, in a unit of its choice, not negative; pins end by it.
        owner: `int32[]` the caller's id of who acts; evictions are noted under it.
    """

    pool: BlockPool
    index: PrefixIndex
    policy: EvictionPolicy
    history: History
    counters: Counters
    pin_budget: jax.Array
    now: jax.Array
    owner: jax.Array


def init_cache(
    num_blocks: int,
    block_size: int,
    *,
    policy: EvictionPolicy | None = None,
    pin_budget: int = 0,
    history_len: int | None = None,
) -> CacheState:
    """An empty manager.

    Args:
        num_blocks: blocks in the pool, the null block included, P.
        block_size: tokens per block, B.
        policy: of eviction; None means LRU.
        pin_budget: blocks that may be pinned at once. Leave room for the longest sequence, and no
            pins can keep it from being admitted once the others are released.
        history_len: evictions remembered, at least; None means four for each block.

    Raises:
        ValueError: a size is out of range.
    """
    if not 0 <= pin_budget < num_blocks:
        raise ValueError(f"{pin_budget=} must be in [0, {num_blocks=})")
    return CacheState(
        pool=init_pool(num_blocks),
        index=init_index(num_blocks, block_size),
        # A copy, so that donating the state does not take the caller's policy.
        policy=jax.tree.map(jnp.copy, eviction_policy() if policy is None else policy),
        history=init_history(4 * num_blocks if history_len is None else history_len),
        counters=Counters(queries=jnp.zeros(2, jnp.uint32), hits=jnp.zeros(2, jnp.uint32)),
        pin_budget=jnp.int32(pin_budget),
        now=jnp.int32(0),
        owner=jnp.int32(0),
    )


def acting(
    state: CacheState, *, now: jax.typing.ArrayLike, owner: jax.typing.ArrayLike = 0
) -> CacheState:
    """The state for what happens at time `now: int32[]` on behalf of `owner: int32[]`."""
    now = jnp.maximum(jnp.asarray(now, jnp.int32), 0)
    return replace(state, now=now, owner=jnp.asarray(owner, jnp.int32))


def count_tokens(counter: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """A counter `uint32[2]` with `num_tokens: int32[]` more."""
    low = counter[0] + num_tokens.astype(jnp.uint32)
    return jnp.stack([low, counter[1] + (low < counter[0]).astype(jnp.uint32)])
