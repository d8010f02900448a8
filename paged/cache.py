"""The functional block manager: pool, prefix index and tables moved together.

Every operation is a pure function `op(state, tables, ...) -> (state, tables, result)` on frozen
pytrees. It is jittable, all or nothing (`ok=False` leaves everything as it was), and the states
passed in stay valid unless the caller donates them, so a state kept aside is a snapshot and going
on from it is a rollback.

A block is *null* (block 0), *free* (no references, not indexed), *cached* (no references,
indexed, evictable) or *active* (referenced).

A worked example: two prompts that share their first block of four tokens and one token more.

    >>> state, tables = init_cache(num_blocks=8, block_size=4), init_tables(2, 2)
    >>> prompt = jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]], jnp.int32)
    >>> state, tables, got = admit(state, tables, 0, prompt, 6, namespace=0)
    >>> bool(got.ok), int(got.num_cached_tokens)
    (True, 0)
    >>> filled = FilledBlocks(
    ...     seat=jnp.array([0, 0]), column=jnp.array([0, 1]), tokens=prompt,
    ...     num_tokens=jnp.array([4, 2]), namespace=jnp.array([0, 0])
    ... )
    >>> state, tables, ok = publish(state, tables, filled, 2)
    >>> other = prompt.at[1, 1].set(9)
    >>> state, tables, got = admit(state, tables, 1, other, 6, namespace=0)
    >>> int(got.num_cached_tokens), int(state.pool.ref_count[tables.block_ids[1, 0]])
    (5, 2)

The fifth token's keys and values are to be copied before the sequence is computed:

    >>> int(got.copies.source) == int(tables.block_ids[0, 1])
    True
    >>> int(got.copies.target) == int(tables.block_ids[1, 1])
    True
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .eviction import select_victims, touch
from .history import record_evictions
from .index import longest_child, match, remove_blocks
from .lanes import after, any_lane
from .pool import allocate, give_back, incref
from .state import CacheState, Counters, count_tokens
from .tables import BlockTables, blocks_for

# Children of one block looked at for the longest common start: the newest are the likeliest.
MAX_CHILDREN = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockCopies:
    """Blocks to copy, `copy_blocks(kv_cache, source, target)`, before anything is written.

    Attributes:
        source, target: `int32[...]`; both are the null block where there is nothing to copy.
    """

    source: jax.Array
    target: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Admission:
    """What `admit` did.

    Attributes:
        ok: `bool[]`.
        num_cached_tokens: `int32[]` tokens that were found instead of computed, those of a block
            that is to be copied included.
        copies: one block, `int32[]`.
    """

    ok: jax.Array
    num_cached_tokens: jax.Array
    copies: BlockCopies


def admit(
    state: CacheState,
    tables: BlockTables,
    seat: jax.typing.ArrayLike,
    tokens: jax.Array,
    num_tokens: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
    *,
    max_cached_tokens: jax.typing.ArrayLike | None = None,
    min_copied_tokens: jax.typing.ArrayLike = 1,
    priority: jax.typing.ArrayLike = 0,
    resumed: jax.typing.ArrayLike = False,
) -> tuple[CacheState, BlockTables, Admission]:
    """Give a sequence its table: share the blocks of its longest cached prefix, take the rest.

    Where the prefix ends inside a block, the child that shares most tokens is to be copied and the
    sequence goes on from that token. Look-up comes before allocation, so a prompt that fills the
    pool can hit itself.

    Args:
        state, tables: the manager.
        seat: `int32[]` empty row.
        tokens: `int32[M, B]` the sequence cut into blocks, padded.
        num_tokens: `int32[]` tokens of it that count, at least 1.
        namespace: `int32[]`.
        max_cached_tokens: `int32[]` tokens that may come from the cache; None means all but the
            last, because its logits are needed.
        min_copied_tokens: `int32[]` fewer shared tokens than these are not worth a copy; more than
            B means never.
        priority: `int32[]` retention priority, not negative.
        resumed: `bool[]`; a sequence that was here before is neither looked up nor hit again in
            the counters.

    Returns:
        `(state, tables, admission)`; `ok` is False, and nothing changes, if the row is in use
        or the sequence does not fit the table or the pool.
    """
    max_blocks = tables.block_ids.shape[1]
    block_size = state.index.block_size
    if tokens.shape != (max_blocks, block_size):
        raise ValueError(f"{tokens.shape=} must be [M, B] = {(max_blocks, block_size)}")
    num_tokens, seat = jnp.asarray(num_tokens, jnp.int32), jnp.asarray(seat, jnp.int32)
    priority = jnp.asarray(priority, jnp.int32)
    limit = num_tokens - 1 if max_cached_tokens is None else jnp.asarray(max_cached_tokens)
    limit = jnp.clip(limit, 0, jnp.maximum(num_tokens, 0)).astype(jnp.int32)
    needed = blocks_for(num_tokens, block_size)
    num_seats = tables.num_blocks.shape[0]
    valid = (num_tokens >= 1) & (needed <= max_blocks) & (seat >= 0) & (seat < num_seats)
    valid &= (tables.num_blocks[jnp.clip(seat, 0, num_seats - 1)] == 0) & (priority >= 0)

    cached, matched = match(state.index, tokens, limit // block_size, namespace)
    parent = jnp.where(matched > 0, cached[jnp.maximum(matched - 1, 0)], NULL_BLOCK)
    rest = jnp.where(matched < needed, jnp.minimum(limit - matched * block_size, block_size), 0)
    if block_size > 1:
        child, shared = longest_child(
            state.index,
            parent,
            namespace,
            tokens[jnp.minimum(matched, max_blocks - 1)],
            rest,
            max_children=MAX_CHILDREN,
        )
    else:
        child = shared = jnp.int32(0)
    # Always true; but the look-up now comes before what `reserve` writes, or XLA copies the index.
    valid &= child >= NULL_BLOCK
    state, ok = reserve(state, needed - matched, max_blocks, spare=cached, enabled=valid)
    shared = jnp.where(ok & (shared >= min_copied_tokens), shared, 0)
    child = jnp.where(shared > 0, child, NULL_BLOCK)
    path = jnp.where(ok, cached, NULL_BLOCK)
    pool, _ = incref(state.pool, path)
    pool, fresh, _ = allocate(pool, jnp.where(ok, needed - matched, 0), max_blocks)
    resumed = jnp.asarray(resumed)
    requests = state.policy.requests + (ok & ~resumed).astype(jnp.int32)
    # A child that made room for its own copy is no longer indexed and is passed over.
    index, policy = touch(
        state.index,
        replace(state.policy, requests=requests),
        jnp.concatenate([path, child[None]])[None],
        hit=~resumed,
        priority=jnp.where(ok, priority, 0),
    )

    column = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.where(column < matched, cached, fresh[jnp.maximum(column - matched, 0)])
    row = jnp.where(column < needed, row, NULL_BLOCK)
    target = jnp.where(ok, seat, num_seats)
    tables = BlockTables(
        block_ids=tables.block_ids.at[target].set(row, mode="drop"),
        num_blocks=tables.num_blocks.at[target].set(needed, mode="drop"),
        priority=tables.priority.at[target].set(priority, mode="drop"),
    )
    found = jnp.where(ok, matched * block_size + shared, 0)
    counted = ok & ~resumed
    counters = Counters(
        queries=count_tokens(state.counters.queries, jnp.where(counted, num_tokens, 0)),
        hits=count_tokens(state.counters.hits, jnp.where(counted, found, 0)),
    )
    admission = Admission(
        ok=ok,
        num_cached_tokens=found,
        copies=BlockCopies(source=child, target=jnp.where(shared > 0, fresh[0], NULL_BLOCK)),
    )
    state = replace(state, pool=pool, index=index, policy=policy, counters=counters)
    return state, tables, admission


def append(
    state: CacheState, tables: BlockTables, num_tokens: jax.Array, max_new_blocks: int
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Grow tables so that each sequence has room for `num_tokens`.

    Args:
        state, tables: the manager.
        num_tokens: `int32[S]` tokens to hold; a row that holds them already does not change.
        max_new_blocks: static bound on the blocks that one row takes.

    Returns:
        `(state, tables, ok bool[])`; all rows grow or, with `ok` False, none does: the pool is
        short, or a row would pass its table or the bound.
    """
    num_seqs, max_blocks = tables.block_ids.shape
    block_size = state.index.block_size
    target = jnp.maximum(blocks_for(num_tokens, block_size), tables.num_blocks)
    grow = target - tables.num_blocks
    valid = jnp.all((target <= max_blocks) & (grow <= max_new_blocks))
    grow = jnp.where(valid, grow, 0)
    total = jnp.sum(grow)
    state, ok = reserve(state, total, num_seqs * max_new_blocks, enabled=valid)
    pool, fresh, _ = allocate(state.pool, jnp.where(ok, total, 0), num_seqs * max_new_blocks)
    step = jnp.arange(max_new_blocks, dtype=jnp.int32)[None, :]
    place = (jnp.cumsum(grow) - grow)[:, None] + step
    column = jnp.where((step < grow[:, None]) & ok, tables.num_blocks[:, None] + step, max_blocks)
    row = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    ids = fresh[jnp.minimum(place, max(fresh.shape[0] - 1, 0))] if fresh.shape[0] else place
    tables = replace(
        tables,
        block_ids=tables.block_ids.at[row, column].set(ids, mode="drop"),
        num_blocks=jnp.where(ok, target, tables.num_blocks),
    )
    return replace(state, pool=pool), tables, ok


def reserve(
    state: CacheState,
    count: jax.typing.ArrayLike,
    max_count: int,
    *,
    spare: jax.Array | None = None,
    enabled: jax.typing.ArrayLike = True,
) -> tuple[CacheState, jax.Array]:
    """Make sure that `count: int32[]` blocks are free, evicting cached ones if need be.

    Args:
        state: the manager.
        count: blocks that must be free afterwards.
        max_count: static bound on the blocks evicted.
        spare: `int32[n]` blocks of one path from its root that must stay; None means none.
        enabled: `bool[]`; False means that nothing is wanted.

    Returns:
        `(state, ok bool[])`; with `enabled` False, or too few blocks even so, nothing changes.
    """
    index = state.index
    enabled = jnp.asarray(enabled)
    count = jnp.maximum(jnp.asarray(count, jnp.int32), 0)
    short = jnp.where(enabled, count - state.pool.num_free, 0)
    most = min(max_count, state.pool.num_blocks)

    # Only the victims come out of the branch: a state that passed through it would be copied.
    def pick(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        evictable = index.indexed & (state.pool.ref_count == 0)
        evictable &= index.pin_until <= state.now
        if spare is not None:
            evictable = evictable.at[spare].set(False)
        enough = short <= jnp.minimum(jnp.sum(evictable, dtype=jnp.int32), most)
        wanted = jnp.where(enough, jnp.maximum(short, 0), 0)
        return select_victims(index, state.policy, evictable, wanted, most), enough

    victims, enough = jax.lax.cond(
        any_lane(short > 0),
        pick,
        lambda _: (jnp.full(most, NULL_BLOCK, jnp.int32), jnp.bool_(False)),
        short,
    )
    # What is recorded is read before anything is written, or XLA copies it.
    gone = after(victims, index.hash[victims], index.uses[victims], index.last_use[victims])
    state = replace(
        state,
        pool=give_back(state.pool, gone),
        index=remove_blocks(index, gone),
        history=record_evictions(state.history, index, victims, state.now, state.owner),
    )
    return state, enabled & ((short <= 0) | enough)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """The manager in numbers.

    Attributes:
        num_free, num_cached, num_active: `int32[]` blocks in each state; they add up to P - 1.
        num_pinned: `int32[]` blocks that are pinned now, in whatever state.
        counters: tokens looked up and found.
    """

    num_free: jax.Array
    num_cached: jax.Array
    num_active: jax.Array
    num_pinned: jax.Array
    counters: Counters


def stats(state: CacheState) -> CacheStats:
    """Count the blocks in each state."""
    live, indexed = state.pool.ref_count > 0, state.index.indexed
    return CacheStats(
        num_free=state.pool.num_free,
        num_cached=jnp.sum(indexed & ~live, dtype=jnp.int32),
        num_active=jnp.sum(live, dtype=jnp.int32),
        num_pinned=jnp.sum(indexed & (state.index.pin_until > state.now), dtype=jnp.int32),
        counters=state.counters,
    )


def namespace_use(state: CacheState, num_namespaces: int) -> jax.Array:
    """Indexed blocks `int32[num_namespaces]` of each namespace `[0, num_namespaces)`."""
    known = state.index.indexed & (state.index.namespace >= 0)
    target = jnp.where(known, state.index.namespace, num_namespaces)
    return jnp.zeros(num_namespaces, jnp.int32).at[target].add(1, mode="drop")


def unfilled_slots(
    tables: BlockTables, context_lens: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Internal waste: `(allocated, unfilled)` slots, `int32[]` each, of all sequences.

    A block shared by several sequences counts once for each.

    Args:
        tables: the tables.
        context_lens: `int32[S]` tokens that each sequence has in the cache.
        block_size: B.
    """
    allocated = jnp.sum(tables.num_blocks) * block_size
    filled = jnp.minimum(context_lens, tables.num_blocks * block_size)
    return allocated, allocated - jnp.sum(filled)
