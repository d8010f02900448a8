"""Publishing: blocks enter the prefix index as they fill, and duplicates are folded into one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import NULL_BLOCK
from . import hashing
from .index import (
    BlockNames,
    find_hash,
    find_named,
    insert_blocks,
    is_named,
    remove_blocks,
    rename_blocks,
)
from .lanes import any_lane
from .pool import decref, incref
from .state import CacheState
from .tables import BlockTables


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FilledBlocks:
    """Blocks that have been filled, for `publish`.

    Attributes:
        seat: `int32[n]` row of the block's sequence.
        column: `int32[n]` position of the block in its table.
        tokens: `int32[n, B]`.
        num_tokens: `int32[n]` how many of them are in the cache, 1 to B.
        namespace: `int32[n]`.
    """

    seat: jax.Array | np.ndarray
    column: jax.Array | np.ndarray
    tokens: jax.Array | np.ndarray
    num_tokens: jax.Array | np.ndarray
    namespace: jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Entries:
    """`FilledBlocks` on device, with the tokens that do not count set to 0."""

    seat: jax.Array
    column: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    namespace: jax.Array


def publish(
    state: CacheState, tables: BlockTables, filled: FilledBlocks, count: jax.typing.ArrayLike
) -> tuple[CacheState, BlockTables, jax.Array]:
    """Index blocks that have just been filled, so that other sequences can share them.

    A full block whose namespace, parent and tokens are indexed already is *folded*: the table
    takes the indexed block and its own copy is dropped. A block that is not full can be copied
    from but not shared; published again with more tokens it is found by those. Publishing what is
    indexed already changes nothing.

    Args:
        state, tables: the manager.
        filled: n blocks; those of one sequence in order and side by side.
        count: `int32[]`, how many of them count.

    Returns:
        `(state, tables, ok bool[])`; `ok` is False, and nothing changes, if an entry is not in
        its table, its parent is neither a full indexed block nor the entry before it, or it would
        add tokens to an indexed block that others hold too.
    """
    count = jnp.asarray(count, jnp.int32)
    size = filled.seat.shape[0]
    if size == 0:
        return state, tables, count == 0
    live = jnp.arange(size, dtype=jnp.int32) < count
    entries = _entries(filled)
    ok = (count >= 0) & (count <= size) & jnp.all(~live | _is_valid(state, tables, entries, live))
    live &= ok
    names, twin, sure = _name(state, tables, entries, live)
    state, tables = _index(state, tables, entries, names, twin, live & sure)

    # A hash that names a wrong block, or the same block twice here: one after the other.
    def one(
        carry: tuple[jax.Array, CacheState, BlockTables],
    ) -> tuple[jax.Array, CacheState, BlockTables]:
        i, state, tables = carry
        entry = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), entries)
        here = live[i][None] & ~sure
        name, _, _ = _name(state, tables, entry, here)
        state, tables = _index(state, tables, entry, name, find_named(state.index, name), here)
        return i + 1, state, tables

    _, state, tables = jax.lax.while_loop(
        lambda carry: any_lane(~sure & (carry[0] < count)), one, (jnp.int32(0), state, tables)
    )
    return state, tables, ok


def _entries(filled: FilledBlocks) -> _Entries:
    def on_device(x: jax.Array | np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    tokens, num_tokens = on_device(filled.tokens), on_device(filled.num_tokens)
    inside = jnp.arange(tokens.shape[1]) < num_tokens[:, None]
    return _Entries(
        seat=on_device(filled.seat),
        column=on_device(filled.column),
        tokens=jnp.where(inside, tokens, 0),
        num_tokens=num_tokens,
        namespace=on_device(filled.namespace),
    )


def _blocks(tables: BlockTables, seat: jax.Array, column: jax.Array) -> jax.Array:
    """The block `int32[n]` at each place, null outside the tables."""
    num_seqs, max_blocks = tables.block_ids.shape
    inside = (seat >= 0) & (seat < num_seqs) & (column >= 0) & (column < max_blocks)
    row, place = jnp.clip(seat, 0, num_seqs - 1), jnp.clip(column, 0, max_blocks - 1)
    return jnp.where(inside, tables.block_ids[row, place], NULL_BLOCK)


def _follows(entries: _Entries, live: jax.Array) -> jax.Array:
    """Whether each entry's parent is the entry before it."""
    before = (jnp.roll(entries.seat, 1) == entries.seat) & jnp.roll(live, 1)
    before &= jnp.roll(entries.column, 1) == entries.column - 1
    return before & (jnp.arange(live.shape[0]) > 0)


def _is_valid(
    state: CacheState, tables: BlockTables, entries: _Entries, live: jax.Array
) -> jax.Array:
    index = state.index
    own = _blocks(tables, entries.seat, entries.column)
    parent = _blocks(tables, entries.seat, entries.column - 1)
    full_before = jnp.roll(entries.num_tokens, 1) == index.block_size
    rooted = (entries.column == 0) | (_follows(entries, live) & full_before)
    rooted |= (parent != NULL_BLOCK) & (index.num_tokens[parent] == index.block_size)
    grows = (index.num_tokens[own] > 0) & (index.num_tokens[own] < entries.num_tokens)
    fits = (entries.num_tokens >= 1) & (entries.num_tokens <= index.block_size)
    return (own != NULL_BLOCK) & rooted & fits & ~(grows & (state.pool.ref_count[own] > 1))


def _name(
    state: CacheState, tables: BlockTables, entries: _Entries, live: jax.Array
) -> tuple[BlockNames, jax.Array, jax.Array]:
    """Name entries, and find the indexed blocks `int32[n]` of the same names.

    The last result says whether all of that is sure: no hash named a block of another name, and no
    two entries have one hash.
    """
    index = state.index
    own = _blocks(tables, entries.seat, entries.column)
    parent = _blocks(tables, entries.seat, entries.column - 1)
    parent = jnp.where(entries.column == 0, NULL_BLOCK, parent)
    follows = _follows(entries, live)
    root = hashing.root_hash(entries.namespace)
    base = jnp.where(entries.column == 0, root, index.hash[parent])
    hashes = hashing.extend_hashes(base, entries.tokens, follows)

    twin = find_hash(index, hashes, ~live)
    stays = jnp.where(twin != NULL_BLOCK, twin, own)
    names = BlockNames(
        namespace=entries.namespace,
        parent=jnp.where(follows, jnp.roll(stays, 1), parent),
        tokens=entries.tokens,
        num_tokens=entries.num_tokens,
        hash=hashes,
    )
    wrong = (twin != NULL_BLOCK) & ~is_named(index, twin, names)
    rank = jnp.sort(jnp.where(live, hashes, 0))
    twice = jnp.any((rank[1:] == rank[:-1]) & (rank[1:] != 0)) | jnp.any(live & (hashes == 0))
    return names, twin, ~(jnp.any(live & wrong) | twice)


def _index(
    state: CacheState,
    tables: BlockTables,
    entries: _Entries,
    names: BlockNames,
    twin: jax.Array,
    live: jax.Array,
) -> tuple[CacheState, BlockTables]:
    """Index live entries of distinct names that have `twin: int32[n]` in the index, or null."""
    index, pool = state.index, state.pool
    own = _blocks(tables, entries.seat, entries.column)
    known = index.num_tokens[own]
    more = live & (known < names.num_tokens)
    alone = twin == NULL_BLOCK
    fold = more & ~alone & (names.num_tokens == index.block_size)

    def chosen(blocks: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.where(where, blocks, NULL_BLOCK)

    index = remove_blocks(index, chosen(own, fold & (known > 0)))
    index = rename_blocks(index, chosen(own, more & alone & (known > 0)), names)
    index = insert_blocks(index, chosen(own, more & alone & (known == 0)), names)
    pool, _ = incref(pool, chosen(twin, fold))
    pool, _ = decref(pool, chosen(own, fold), index.indexed)
    row = jnp.where(fold, entries.seat, tables.block_ids.shape[0])
    tables = replace(
        tables, block_ids=tables.block_ids.at[row, entries.column].set(twin, mode="drop")
    )
    return replace(state, pool=pool, index=index), tables
