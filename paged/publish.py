"""Publishing: blocks enter the prefix index as they fill, and duplicates are folded into one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import NULL_BLOCK
from ..pallas_kernels.layout import debug_check
from . import hashing
from .eviction import remember
from .index import BlockNames, change_blocks, find_hash, find_named, is_named
from .lanes import any_lane
from .order import order_of
from .pool import BlockPool, give_back
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
        its table, its parent is neither a full indexed block nor the entry before it, it would
        add tokens to an indexed block that others hold too, or its block is indexed with other
        tokens or in another namespace.
    """
    count = jnp.asarray(count, jnp.int32)
    size = filled.seat.shape[0]
    if size == 0:
        return state, tables, count == 0
    live = jnp.arange(size, dtype=jnp.int32) < count
    entries = _entries(filled)
    ok = (count >= 0) & (count <= size) & jnp.all(~live | _is_valid(state, tables, entries, live))
    own = _blocks(tables, entries.seat, entries.column)
    agree, distinct = _compare(own, entries.num_tokens, live, state.pool.num_blocks)
    ok &= agree
    debug_check(ok, "publish: an entry is not in its table, or its parent is not indexed")
    live &= ok
    names, twin, sure = _name(state, tables, entries, live)
    unsure = live & ~(sure & distinct)
    names, twin = _name_one_by_one(state, tables, entries, unsure, names, twin)
    state, tables = _index(state, tables, entries, names, twin, live)
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
    """Whether each entry's parent is the entry before it, which is full."""
    before = (jnp.roll(entries.seat, 1) == entries.seat) & jnp.roll(live, 1)
    before &= jnp.roll(entries.column, 1) == entries.column - 1
    before &= jnp.roll(entries.namespace, 1) == entries.namespace
    before &= jnp.roll(entries.num_tokens, 1) == entries.tokens.shape[1]
    return before & (jnp.arange(live.shape[0]) > 0)


def _is_valid(
    state: CacheState, tables: BlockTables, entries: _Entries, live: jax.Array
) -> jax.Array:
    index = state.index
    own = _blocks(tables, entries.seat, entries.column)
    parent = _blocks(tables, entries.seat, entries.column - 1)
    found = (parent != NULL_BLOCK) & (index.num_tokens[parent] == index.block_size)
    found &= index.namespace[parent] == entries.namespace
    rooted = (entries.column == 0) | _follows(entries, live) | found
    grows = (index.num_tokens[own] > 0) & (index.num_tokens[own] < entries.num_tokens)
    # Whoever wrote other tokens into a block that is found had to copy it first.
    both = jnp.minimum(index.num_tokens[own], entries.num_tokens)[:, None]
    beyond = jnp.arange(index.block_size, dtype=jnp.int32) >= both
    same = jnp.all((index.tokens[own] == entries.tokens) | beyond, axis=1)
    same &= index.namespace[own] == entries.namespace
    fits = (entries.num_tokens >= 1) & (entries.num_tokens <= index.block_size)
    fits &= (index.num_tokens[own] == 0) | same
    return (own != NULL_BLOCK) & rooted & fits & ~(grows & (state.pool.ref_count[own] > 1))


def _compare(
    blocks: jax.Array, num_tokens: jax.Array, live: jax.Array, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Whether live entries `int32[n]` of one block, in tables that share it, are equally long, and
    whether there are none such.
    """
    blocks = jnp.where(live, blocks, NULL_BLOCK)
    order = order_of(blocks, num_blocks)
    blocks, num_tokens = blocks[order], num_tokens[order]
    same = (blocks[1:] == blocks[:-1]) & (blocks[1:] != NULL_BLOCK)
    return ~jnp.any(same & (num_tokens[1:] != num_tokens[:-1])), ~jnp.any(same)


def _name(
    state: CacheState, tables: BlockTables, entries: _Entries, live: jax.Array
) -> tuple[BlockNames, jax.Array, jax.Array]:
    """Name entries, and find the blocks `int32[n]` that have these names already.

    The last result says whether all of that is sure, if no two entries have one block: no hash
    named a block of another name, and no two entries have one hash.
    """
    index = state.index
    own = _blocks(tables, entries.seat, entries.column)
    parent = _blocks(tables, entries.seat, entries.column - 1)
    parent = jnp.where(entries.column == 0, NULL_BLOCK, parent)
    follows = _follows(entries, live)
    root = hashing.root_hash(entries.namespace)
    base = jnp.where(entries.column == 0, root, index.hash[parent])
    hashes = hashing.extend_hashes(base, entries.tokens, follows)
    hashes = hashing.partial_hash(hashes, index.block_size - entries.num_tokens)

    twin = find_hash(index, hashes, ~live)
    stays = jnp.where(twin != NULL_BLOCK, twin, own)
    names = BlockNames(
        namespace=entries.namespace,
        parent=jnp.where(follows, jnp.roll(stays, 1), parent),
        tokens=entries.tokens,
        num_tokens=entries.num_tokens,
        hash=hashes,
    )
    wrong = live & (twin != NULL_BLOCK) & ~is_named(index, twin, names)
    sure = ~(jnp.any(wrong) | _repeats(hashes.astype(jnp.int32), live))
    return names, twin, sure


def _repeats(values: jax.Array, live: jax.Array) -> jax.Array:
    """Whether two live entries of `values: int32[n]` are equal, or one is 0."""
    ranked = jnp.sort(jnp.where(live, values, 0))
    twice = (ranked[1:] == ranked[:-1]) & (ranked[1:] != 0)
    return jnp.any(twice) | jnp.any(live & (values == 0))


def _name_one_by_one(
    state: CacheState,
    tables: BlockTables,
    entries: _Entries,
    live: jax.Array,
    names: BlockNames,
    twin: jax.Array,
) -> tuple[BlockNames, jax.Array]:
    """What `_name` could not be sure of: each live entry by exact look-up, earlier ones included.

    Nothing but names and twins goes round the loop: a state would be copied by it.
    """
    size = live.shape[0]
    own = _blocks(tables, entries.seat, entries.column)
    follows = _follows(entries, live)
    place = jnp.arange(size, dtype=jnp.int32)
    # A block that is found with more tokens keeps that name, and takes no shorter one from others.
    named = live & (state.index.num_tokens[own] < names.num_tokens)

    def one(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, parents, twins = carry
        stays = jnp.where(twins != NULL_BLOCK, twins, own)
        parent = jnp.where(follows[i] & live[i], stays[jnp.maximum(i - 1, 0)], parents[i])
        parents = parents.at[i].set(parent)
        name = jax.tree.map(lambda x: x[i], replace(names, parent=parents))
        indexed = find_named(state.index, name)
        earlier = live & (place < i)
        same = earlier & named & (twins == NULL_BLOCK) & (parents == parent)
        same &= (names.namespace == name.namespace) & (names.num_tokens == name.num_tokens)
        same &= jnp.all(names.tokens == name.tokens, axis=1)
        # A block that stands in several tables goes with the first.
        again = earlier & (own == own[i])
        found = jnp.where(jnp.any(same), own[jnp.argmax(same)], NULL_BLOCK)
        found = jnp.where(indexed != NULL_BLOCK, indexed, found)
        found = jnp.where(jnp.any(again), stays[jnp.argmax(again)], found)
        return i + 1, parents, twins.at[i].set(jnp.where(live[i], found, twins[i]))

    _, parents, twin = jax.lax.while_loop(
        lambda carry: any_lane(carry[0] < jnp.sum(live, dtype=jnp.int32)),
        one,
        (jnp.int32(0), names.parent, twin),
    )
    return replace(names, parent=parents), twin


def _index(
    state: CacheState,
    tables: BlockTables,
    entries: _Entries,
    names: BlockNames,
    twin: jax.Array,
    live: jax.Array,
) -> tuple[CacheState, BlockTables]:
    """Index live entries whose names no block has, and fold full ones into their `twin`."""
    index = state.index
    own = _blocks(tables, entries.seat, entries.column)
    known = index.num_tokens[own]
    more = live & (known < names.num_tokens)
    alone = more & (twin == NULL_BLOCK)
    fold = more & ~alone & (twin != own) & (names.num_tokens == index.block_size)

    def chosen(blocks: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.where(where, blocks, NULL_BLOCK)

    added = chosen(own, alone & (known == 0))
    index = change_blocks(
        index,
        names,
        added=added,
        renamed=chosen(own, alone & (known > 0)),
        removed=chosen(own, fold & (known > 0)),
    )
    index, policy = remember(index, state.policy, state.history, added)
    # A pin of the part that was cached holds on to the whole.
    pinned = jnp.where(fold & (known > 0), twin, state.pool.num_blocks)
    pins = index.pin_until.at[pinned].max(index.pin_until[own], mode="drop")
    index = replace(index, pin_until=pins)
    pool, tables = _fold(state.pool, tables, own, chosen(twin, fold))
    return replace(state, pool=pool, index=index, policy=policy), tables


def _fold(
    pool: BlockPool, tables: BlockTables, own: jax.Array, twin: jax.Array
) -> tuple[BlockPool, BlockTables]:
    """Let every table that holds one of `own: int32[n]` hold its `twin` instead, null for none.

    All holders at once: what they share after it is found after the twin from now on.
    """
    fold = twin != NULL_BLOCK
    at = jnp.where(fold, own, pool.num_blocks)
    any_fold = any_lane(jnp.any(fold))

    def first_ones(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Once for each block, whichever table it stands in.
        order = order_of(at, pool.num_blocks + 1)
        ranked = at[order]
        first = jnp.concatenate([jnp.ones(1, bool), ranked[1:] != ranked[:-1]])
        folded = jnp.where(first & (ranked < pool.num_blocks), ranked, NULL_BLOCK)
        return jnp.zeros_like(first).at[order].set(first), jnp.sort(folded, descending=True)

    # Nearly always there is none to sort.
    first, folded = jax.lax.cond(
        any_fold, first_ones, lambda at: (jnp.zeros_like(fold), jnp.zeros_like(at)), at
    )
    more = jnp.where(fold & first, pool.ref_count[own], 0)

    def renamed(block_ids: jax.Array) -> jax.Array:
        names = jnp.arange(pool.num_blocks, dtype=jnp.int32).at[at].set(twin, mode="drop")
        return names[block_ids]

    block_ids = jax.lax.cond(any_fold, renamed, lambda block_ids: block_ids, tables.block_ids)
    ref_count = pool.ref_count.at[jnp.where(fold, twin, pool.num_blocks)].add(more, mode="drop")
    pool = replace(pool, ref_count=ref_count.at[at].set(0, mode="drop"))
    return give_back(pool, folded), replace(tables, block_ids=block_ids)
