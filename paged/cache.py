"""The functional block manager: pool, prefix index and tables moved together.

Every operation is a pure function `op(state, tables, ...) -> (state, tables, result)` on frozen
pytrees. It is jittable, all or nothing (`ok=False` leaves everything as it was), and the states
passed in stay valid unless the caller donates them, so a state kept aside is a snapshot.

A block is *null* (block 0), *free* (no references, not indexed), *cached* (no references,
indexed, evictable) or *active* (referenced).

A worked example: two prompts that share their first block of four tokens.

    >>> state, tables = init_cache(num_blocks=8, block_size=4), init_tables(2, 2)
    >>> prompt = jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]], jnp.int32)
    >>> state, tables, got = admit(state, tables, 0, prompt, 6, namespace=0)
    >>> bool(got.ok), int(got.num_cached_blocks)
    (True, 0)
    >>> filled = FilledBlocks(
    ...     seat=jnp.array([0]), column=jnp.array([0]), tokens=prompt[:1], namespace=jnp.array([0])
    ... )
    >>> state, tables, ok = publish(state, tables, filled, 1)
    >>> state, tables, got = admit(state, tables, 1, prompt, 6, namespace=0)
    >>> int(got.num_cached_blocks), int(state.pool.ref_count[tables.block_ids[1, 0]])
    (1, 2)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import NULL_BLOCK
from . import hashing
from .index import (
    PrefixIndex,
    evict,
    find_block,
    init_index,
    insert_block,
    limit_clock,
    match,
    touch,
)
from .pool import BlockPool, allocate, decref, incref, init_pool
from .tables import BlockTables


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CacheState:
    """The block pool and the index over it."""

    pool: BlockPool
    index: PrefixIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Admission:
    """What `admit` did.

    Attributes:
        ok: `bool[]`.
        num_cached_blocks: `int32[]` blocks that were found instead of computed.
    """

    ok: jax.Array
    num_cached_blocks: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FilledBlocks:
    """Blocks that have just been filled, for `publish`.

    Attributes:
        seat: `int32[n]` row of the block's sequence.
        column: `int32[n]` position of the block in its table.
        tokens: `int32[n, B]`.
        namespace: `int32[n]`.
    """

    seat: jax.Array | np.ndarray
    column: jax.Array | np.ndarray
    tokens: jax.Array | np.ndarray
    namespace: jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """How many blocks are in each state, `int32[]` each; they add up to P - 1."""

    num_free: jax.Array
    num_cached: jax.Array
    num_active: jax.Array


def init_cache(num_blocks: int, block_size: int) -> CacheState:
    """An empty manager of `num_blocks` blocks, the null block included."""
    return CacheState(pool=init_pool(num_blocks), index=init_index(num_blocks, block_size))


def admit(
    state: CacheState,
    tables: BlockTables,
    seat: jax.typing.ArrayLike,
    tokens: jax.Array,
    num_tokens: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
) -> tuple[CacheState, BlockTables, Admission]:
    """Give a sequence its table: share the blocks of its longest cached prefix, take the rest.

    The last token is never taken from the cache, because its logits are needed. Look-up comes
    before allocation, so a prompt that fills the pool can hit itself.

    Args:
        state, tables: the manager.
        seat: `int32[]` empty row.
        tokens: `int32[M, B]` the sequence cut into blocks, padded.
        num_tokens: `int32[]` tokens of it that count, at least 1.
        namespace: `int32[]`.

    Returns:
        `(state, tables, admission)`; `ok` is False, and nothing changes, if the row is in use
        or the sequence does not fit the table or the pool.
    """
    max_blocks = tables.block_ids.shape[1]
    block_size = state.index.block_size
    if tokens.shape != (max_blocks, block_size):
        raise ValueError(f"{tokens.shape=} must be [M, B] = {(max_blocks, block_size)}")
    num_tokens = jnp.asarray(num_tokens, jnp.int32)
    seat = jnp.asarray(seat, jnp.int32)
    needed = -(-num_tokens // block_size)
    valid = (num_tokens >= 1) & (needed <= max_blocks)
    valid &= (seat >= 0) & (seat < tables.num_blocks.shape[0])
    valid &= tables.num_blocks[seat] == 0

    cached, matched = match(state.index, tokens, (num_tokens - 1) // block_size, namespace)
    state, ok = reserve(state, needed - matched, spare=cached, enabled=valid)
    shared = jnp.where(ok, cached, NULL_BLOCK)
    pool, _ = incref(state.pool, shared)
    pool, fresh, _ = allocate(pool, jnp.where(ok, needed - matched, 0), max_blocks)
    index = jax.lax.cond(ok, touch, lambda index, _: index, state.index, shared)

    column = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.where(column < matched, cached, fresh[jnp.maximum(column - matched, 0)])
    row = jnp.where(column < needed, row, NULL_BLOCK)
    target = jnp.where(ok, seat, tables.num_blocks.shape[0])
    tables = BlockTables(
        block_ids=tables.block_ids.at[target].set(row, mode="drop"),
        num_blocks=tables.num_blocks.at[target].set(needed, mode="drop"),
    )
    admission = Admission(ok=ok, num_cached_blocks=jnp.where(ok, matched, 0))
    return CacheState(pool=pool, index=index), tables, admission


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
    target = jnp.maximum(-(-num_tokens // block_size), tables.num_blocks)
    grow = target - tables.num_blocks
    valid = jnp.all((target <= max_blocks) & (grow <= max_new_blocks))
    total = jnp.sum(grow)
    state, ok = reserve(state, total, enabled=valid)
    pool, fresh, _ = allocate(state.pool, jnp.where(ok, total, 0), num_seqs * max_new_blocks)
    step = jnp.arange(max_new_blocks, dtype=jnp.int32)[None, :]
    place = (jnp.cumsum(grow) - grow)[:, None] + step
    column = jnp.where((step < grow[:, None]) & ok, tables.num_blocks[:, None] + step, max_blocks)
    row = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    ids = fresh[jnp.minimum(place, fresh.shape[0] - 1)]
    tables = BlockTables(
        block_ids=tables.block_ids.at[row, column].set(ids, mode="drop"),
        num_blocks=jnp.where(ok, target, tables.num_blocks),
    )
    return replace(state, pool=pool), tables, ok


def reserve(
    state: CacheState,
    count: jax.typing.ArrayLike,
    *,
    spare: jax.Array | None = None,
    enabled: jax.typing.ArrayLike = True,
) -> tuple[CacheState, jax.Array]:
    """Make sure that `count: int32[]` blocks are free, evicting cached ones if need be.

    Args:
        state: the manager.
        count: blocks that must be free afterwards.
        spare: `int32[n]` blocks of one path from its root that must stay; None means none.
        enabled: `bool[]`; False means that nothing is wanted.

    Returns:
        `(state, ok bool[])`; with `enabled` False, or too few blocks even so, nothing changes.
    """
    count = jnp.asarray(count, jnp.int32)
    short = count - state.pool.num_free
    evictable = state.index.indexed & (state.pool.ref_count == 0)
    if spare is not None:
        evictable = evictable.at[spare].set(False)
    ok = jnp.asarray(enabled) & (short <= jnp.sum(evictable, dtype=jnp.int32))

    def make_room(state: CacheState) -> CacheState:
        index, victims = evict(state.index, evictable, short)
        pool = state.pool
        place = pool.num_free + jnp.cumsum(victims, dtype=jnp.int32) - 1
        ids = jnp.arange(pool.num_blocks, dtype=jnp.int32)
        stack = pool.free_stack.at[jnp.where(victims, place, pool.num_blocks)].set(ids, mode="drop")
        freed = jnp.sum(victims, dtype=jnp.int32)
        return CacheState(
            pool=replace(pool, free_stack=stack, num_free=pool.num_free + freed), index=index
        )

    return jax.lax.cond(ok & (short > 0), make_room, lambda state: state, state), ok


def publish(
    state: CacheState, tables: BlockTables, filled: FilledBlocks, count: jax.typing.ArrayLike
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Index blocks that have just been filled, so that other sequences can share them.

    A block whose namespace, parent and tokens are indexed already is *folded*: the table takes
    the indexed block and its own copy is dropped.

    Args:
        state, tables: the manager.
        filled: n blocks; those of one sequence in order.
        count: `int32[]`, how many of them count.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if an entry is not in
        its table or its parent is neither indexed nor the entry before it.
    """
    num_seqs, max_blocks = tables.block_ids.shape
    num_pool = state.pool.num_blocks
    count = jnp.asarray(count, jnp.int32)
    seat, column = filled.seat, filled.column
    if seat.shape[0] == 0:
        return state, tables, count == 0
    row = jnp.clip(seat, 0, num_seqs - 1)
    inside = (seat >= 0) & (seat < num_seqs) & (column >= 0)
    inside &= column < tables.num_blocks[row]
    parent_block = tables.block_ids[row, jnp.clip(column - 1, 0, max_blocks - 1)]
    follows = (jnp.roll(seat, 1) == seat) & (jnp.roll(column, 1) == column - 1)
    follows = follows.at[:1].set(False)
    rooted = (column == 0) | follows | state.index.indexed[parent_block]
    position = jnp.arange(seat.shape[0], dtype=jnp.int32)
    ok = jnp.all((position >= count) | (inside & rooted)) & (count <= seat.shape[0])

    def one(i: jax.Array, carry: tuple[CacheState, BlockTables]) -> tuple[CacheState, BlockTables]:
        state, tables = carry
        index, pool = state.index, state.pool
        s, c = seat[i], column[i]
        own = tables.block_ids[s, c]
        parent = jnp.where(c == 0, NULL_BLOCK, tables.block_ids[s, jnp.maximum(c - 1, 0)])
        root = hashing.root_hash(filled.namespace[i])
        block_hash = hashing.extend_hash(
            jnp.where(c == 0, root, index.hash[parent]), filled.tokens[i]
        )
        head = index.bucket_head[hashing.bucket_of(block_hash, index.bucket_head.shape[0])]
        twin = find_block(index, head, filled.namespace[i], parent, filled.tokens[i])
        fold = (twin != NULL_BLOCK) & (twin != own)
        index = insert_block(
            index,
            jnp.where((twin == NULL_BLOCK) & ~index.indexed[own], own, num_pool),
            block_hash=block_hash,
            namespace=filled.namespace[i],
            parent=parent,
            tokens=filled.tokens[i],
            last_access=index.clock,
        )
        index = replace(index, clock=index.clock + 1)
        pool, _ = incref(pool, jnp.where(fold, twin, NULL_BLOCK)[None])
        pool, _ = decref(pool, jnp.where(fold, own, NULL_BLOCK)[None], index.indexed)
        block_ids = tables.block_ids.at[s, c].set(jnp.where(fold, twin, own))
        return CacheState(pool=pool, index=index), replace(tables, block_ids=block_ids)

    state, tables = jax.lax.fori_loop(0, jnp.where(ok, count, 0), one, (state, tables))
    return state, tables, ok


def release(
    state: CacheState, tables: BlockTables, seat: jax.typing.ArrayLike
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Give back a sequence's blocks; indexed ones stay cached, most recently used.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if `seat: int32[]` is
        no row or an empty one.
    """
    seat = jnp.asarray(seat, jnp.int32)
    num_seqs = tables.num_blocks.shape[0]
    inside = (seat >= 0) & (seat < num_seqs)
    ok = inside & (tables.num_blocks[jnp.where(inside, seat, 0)] > 0)
    row = jnp.where(ok, tables.block_ids[jnp.where(inside, seat, 0)], NULL_BLOCK)
    index = jax.lax.cond(
        ok,
        lambda index, row: touch(limit_clock(index), row),
        lambda index, _: index,
        state.index,
        row,
    )
    pool, _ = decref(state.pool, row, index.indexed)
    target = jnp.where(ok, seat, num_seqs)
    tables = BlockTables(
        block_ids=tables.block_ids.at[target].set(NULL_BLOCK, mode="drop"),
        num_blocks=tables.num_blocks.at[target].set(0, mode="drop"),
    )
    return CacheState(pool=pool, index=index), tables, ok


def stats(state: CacheState) -> CacheStats:
    """Count the blocks in each state."""
    live = state.pool.ref_count > 0
    return CacheStats(
        num_free=state.pool.num_free,
        num_cached=jnp.sum(state.index.indexed & ~live, dtype=jnp.int32),
        num_active=jnp.sum(live, dtype=jnp.int32),
    )
