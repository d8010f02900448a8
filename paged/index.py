"""The prefix index: blocks found by namespace, parent and tokens, on immutable arrays.

The index is a forest. A block's parent is the full block before it in its sequence (the null block
for a first one); a block that is not full has no children. (namespace, parent, tokens) names at
most one block. Hashes nominate blocks, tokens and parent decide.

`last_access` is unique per block. Along any path of blocks without references it, `hits`, `worth`,
`last_use`, `priority` and `pin_until` never grow from parent to child, because whoever uses a child
uses its ancestors: so every eviction order that grows with them takes leaves first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from . import buckets, hashing
from .buckets import Buckets
from .lanes import after, any_lane

# Past this access times are replaced by ranks, long before int32 would overflow.
_CLOCK_LIMIT = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefixIndex:
    """Which blocks are cached for reuse, and what is known of their use.

    Attributes:
        num_tokens: `int32[P]` tokens by which a block can be found; 0 if it is not indexed.
        tokens: `int32[P, B]` of each indexed block, 0 past `num_tokens`.
        parent: `int32[P]`; the null block for the first block of a sequence.
        namespace: `int32[P]`, see `Namespaces`.
        hash: `uint32[P]`.
        last_access: `int32[P]`, unique among indexed blocks.
        hits: `int32[P]` times that a request found the block.
        uses: `float32[P]` how often the block was used again, evictions between included; older
            uses count less.
        last_use: `int32[P]` when that was last, in requests.
        worth: `float32[P]` what keeping the block, and its descendants, was worth at best.
        priority: `int32[P]` highest retention priority of its users.
        pin_until: `int32[P]` time up to which the block must stay.
        clock: `int32[]`, larger than every `last_access`.
        by_hash: all indexed blocks by `hash`.
        by_parent: all indexed blocks by parent, namespace and first token.
    """

    num_tokens: jax.Array
    tokens: jax.Array
    parent: jax.Array
    namespace: jax.Array
    hash: jax.Array
    last_access: jax.Array
    hits: jax.Array
    uses: jax.Array
    last_use: jax.Array
    worth: jax.Array
    priority: jax.Array
    pin_until: jax.Array
    clock: jax.Array
    by_hash: Buckets
    by_parent: Buckets

    @property
    def block_size(self) -> int:
        """Tokens per block, B."""
        return self.tokens.shape[1]

    @property
    def indexed(self) -> jax.Array:
        """`bool[P]`."""
        return self.num_tokens > 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """What names a block in the index.

    Attributes:
        namespace: `int32[n]`.
        parent: `int32[n]`.
        tokens: `int32[n, B]`, 0 past `num_tokens`.
        num_tokens: `int32[n]`, 1 to B.
        hash: `uint32[n]`.
    """

    namespace: jax.Array
    parent: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    hash: jax.Array


def init_index(num_blocks: int, block_size: int) -> PrefixIndex:
    """An empty index over a pool of `num_blocks` blocks of `block_size` tokens."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")

    # One array each: a buffer that stands twice in a state cannot be donated.
    def zeros(dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return jnp.zeros(num_blocks, dtype)

    return PrefixIndex(
        num_tokens=zeros(),
        tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
        parent=zeros(),
        namespace=zeros(),
        hash=zeros(jnp.uint32),
        last_access=zeros(),
        hits=zeros(),
        uses=zeros(jnp.float32),
        last_use=zeros(),
        worth=zeros(jnp.float32),
        priority=zeros(),
        pin_until=zeros(),
        clock=jnp.int32(1),
        by_hash=buckets.init_buckets(num_blocks),
        by_parent=buckets.init_buckets(num_blocks),
    )


def match(
    index: PrefixIndex,
    tokens: jax.Array,
    num_blocks: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Find the longest indexed prefix of full blocks of a token sequence; nothing is changed.

    Args:
        index: the index.
        tokens: `int32[n, B]`, the sequence cut into blocks.
        num_blocks: `int32[]` full blocks to look for, at most n.
        namespace: `int32[]`.

    Returns:
        `(block_ids int32[n], num_matched int32[])`; ids past `num_matched` are null.
    """
    count, size = tokens.shape
    if count == 0:
        return jnp.zeros(0, jnp.int32), jnp.int32(0)
    num_blocks = jnp.clip(jnp.asarray(num_blocks, jnp.int32), 0, count)
    namespace = jnp.asarray(namespace, jnp.int32)
    hashes = hashing.chain_hashes(tokens, namespace)
    position = jnp.arange(count, dtype=jnp.int32)
    wanted = position < num_blocks

    # Past the wanted ones everything is right, so that no list is walked for padding.
    named = find_hash(index, hashes, ~wanted)
    before = jnp.concatenate([jnp.full(1, NULL_BLOCK, jnp.int32), named[:-1]])
    names = BlockNames(
        namespace=namespace,
        parent=before,
        tokens=tokens,
        num_tokens=jnp.int32(size),
        hash=hashes,
    )
    hit = is_named(index, named, names) & wanted
    fast = jnp.min(jnp.where(hit, count, position))

    # The hash named a block that tokens or parent refuse: the right one may stand behind it.
    stuck = (fast < num_blocks) & (named[jnp.minimum(fast, count - 1)] != NULL_BLOCK)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, ids, searching = state
        at = jnp.minimum(i, count - 1)
        parent = jnp.where(i > 0, ids[jnp.maximum(at - 1, 0)], NULL_BLOCK)
        name = BlockNames(
            namespace=namespace,
            parent=parent,
            tokens=tokens[at],
            num_tokens=jnp.int32(size),
            hash=hashes[at],
        )
        block = find_named(index, name)
        searching &= i < num_blocks
        found = searching & (block != NULL_BLOCK)
        ids = ids.at[jnp.where(searching, i, count)].set(block, mode="drop")
        return i + found.astype(jnp.int32), ids, found

    matched, ids, _ = jax.lax.while_loop(
        lambda state: any_lane(state[2] & (state[0] < num_blocks)), step, (fast, named, stuck)
    )
    return jnp.where(position < matched, ids, NULL_BLOCK), matched


def find_hash(index: PrefixIndex, hashes: jax.Array, skip: jax.Array) -> jax.Array:
    """A block `int32[n]` of each hash `uint32[n]`, null where none has it or `skip: bool[n]`."""
    found = buckets.find(index.by_hash, hashes, lambda b: skip | (index.hash[b] == hashes))
    return jnp.where(skip, NULL_BLOCK, found)


def find_named(index: PrefixIndex, name: BlockNames) -> jax.Array:
    """The block `int32[...]` with exactly this name, or the null block."""
    return buckets.find(index.by_hash, name.hash, lambda block: is_named(index, block, name))


def is_named(index: PrefixIndex, block: jax.Array, name: BlockNames) -> jax.Array:
    """Whether each block `int32[...]` is indexed by exactly this name."""
    return (
        (block != NULL_BLOCK)
        & (index.num_tokens[block] == name.num_tokens)
        & (index.namespace[block] == name.namespace)
        & (index.parent[block] == name.parent)
        & jnp.all(index.tokens[block] == name.tokens, axis=-1)
    )


def longest_child(
    index: PrefixIndex,
    parent: jax.Array,
    namespace: jax.typing.ArrayLike,
    tokens: jax.Array,
    limit: jax.Array,
    *,
    max_children: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The child of a block that shares most tokens with `tokens: int32[B]` from the start.

    Args:
        index: the index.
        parent: `int32[]`; the null block stands for the root.
        namespace: `int32[]`.
        tokens: what to compare with.
        limit: `int32[]` tokens that count.
        max_children: how many of those in the list to look at, the newest; None means all.

    Returns:
        `(child int32[], num_shared int32[])`; the null block and 0 if none shares any.
    """
    namespace = jnp.asarray(namespace, jnp.int32)
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    most = jnp.iinfo(jnp.int32).max if max_children is None else max_children

    def shared(block: jax.Array) -> jax.Array:
        same = (index.tokens[block] == tokens) & (place < index.num_tokens[block])
        length = jnp.min(jnp.where(same, tokens.shape[0], place))
        ours = (index.parent[block] == parent) & (index.namespace[block] == namespace)
        return jnp.where(ours & (block != NULL_BLOCK), jnp.minimum(length, limit), 0)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, best, length, seen = state
        here = jnp.where(seen < most, shared(block), 0)
        best = jnp.where(here > length, block, best)
        return index.by_parent.next[block], best, jnp.maximum(here, length), seen + 1

    head = buckets.first_block(
        index.by_parent, hashing.child_key(jnp.asarray(parent), namespace, tokens[0])
    )
    none, zero = jnp.int32(NULL_BLOCK), jnp.int32(0)
    _, best, length, _ = jax.lax.while_loop(
        lambda s: any_lane((s[0] != NULL_BLOCK) & (s[2] < limit) & (s[3] < most)),
        step,
        (jnp.where(limit > 0, head, NULL_BLOCK), none, zero, zero),
    )
    return best, length


def change_blocks(
    index: PrefixIndex,
    names: BlockNames,
    *,
    added: jax.Array,
    renamed: jax.Array,
    removed: jax.Array,
) -> PrefixIndex:
    """Index blocks, give indexed ones more tokens under the same parent, and take others out.

    Args:
        index: the index.
        names: of the blocks that are added or renamed; in order, parents before children.
        added, renamed, removed: `int32[n]` distinct blocks, each in one of the three and null in
            the others.
    """
    num_blocks = index.num_tokens.shape[0]
    old = jnp.where(renamed != NULL_BLOCK, renamed, removed)
    old_hash, old_key = index.hash[old], _child_keys(index, removed)
    new = jnp.where(added != NULL_BLOCK, added, renamed)
    new_key = hashing.child_key(names.parent, names.namespace, names.tokens[:, 0])

    def target(blocks: jax.Array) -> jax.Array:
        place = jnp.where(blocks != NULL_BLOCK, blocks, num_blocks)
        return after(place, old_hash, old_key, index.clock)

    to_added, to_new = target(added), target(new)
    # The first is the newest: parents are newer than their children.
    live = (added != NULL_BLOCK).astype(jnp.int32)
    later = jnp.cumsum(live[::-1])[::-1] - 1

    def put(array: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
        return array.at[to_added].set(jnp.asarray(value, array.dtype), mode="drop")

    num_tokens = index.num_tokens.at[target(removed)].set(0, mode="drop")
    by_hash = buckets.remove(index.by_hash, old, old_hash)
    by_parent = buckets.remove(index.by_parent, removed, old_key)
    return replace(
        index,
        num_tokens=num_tokens.at[to_new].set(names.num_tokens, mode="drop"),
        tokens=index.tokens.at[to_new].set(names.tokens, mode="drop"),
        hash=index.hash.at[to_new].set(names.hash, mode="drop"),
        parent=put(index.parent, names.parent),
        namespace=put(index.namespace, names.namespace),
        last_access=put(index.last_access, index.clock + later),
        hits=put(index.hits, 0),
        worth=put(index.worth, 0),
        priority=put(index.priority, 0),
        pin_until=put(index.pin_until, 0),
        clock=index.clock + jnp.sum(live, dtype=jnp.int32),
        by_hash=buckets.insert(by_hash, new, names.hash),
        by_parent=buckets.insert(by_parent, added, new_key),
    )


def remove_blocks(index: PrefixIndex, block_ids: jax.Array) -> PrefixIndex:
    """Take distinct indexed blocks `int32[n]` out; null blocks are padding."""
    hashes, keys = index.hash[block_ids], _child_keys(index, block_ids)
    target = jnp.where(block_ids != NULL_BLOCK, block_ids, index.num_tokens.shape[0])
    # The clock is known once everything that was touched before has been read.
    target = after(target, hashes, keys, index.clock)
    return replace(
        index,
        num_tokens=index.num_tokens.at[target].set(0, mode="drop"),
        by_hash=buckets.remove(index.by_hash, block_ids, hashes),
        by_parent=buckets.remove(index.by_parent, block_ids, keys),
    )


def _child_keys(index: PrefixIndex, block_ids: jax.Array) -> jax.Array:
    parent, namespace = index.parent[block_ids], index.namespace[block_ids]
    return hashing.child_key(parent, namespace, index.tokens[block_ids, 0])


def limit_clock(index: PrefixIndex, enabled: jax.typing.ArrayLike = True) -> PrefixIndex:
    """Replace access times by their ranks when the clock has run far; order is kept."""
    far = jnp.asarray(enabled) & (index.clock >= _CLOCK_LIMIT)

    def rank(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(jnp.where(index.indexed, index.last_access, 0))
        ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
        times = jnp.where(index.indexed, ranks.astype(jnp.int32) + 1, 0)
        return jnp.where(far, times, index.last_access), jnp.where(
            far, order.shape[0] + 1, index.clock
        )

    times, clock = jax.lax.cond(
        any_lane(far), rank, lambda _: (index.last_access, index.clock), index.clock
    )
    return replace(index, last_access=times, clock=clock)
