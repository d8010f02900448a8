"""The checker of the block manager's invariants, for tests and debug mode."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import NULL_BLOCK
from .buckets import Buckets
from .errors import InvariantViolation
from .hashing import bucket_of, child_key, extend_hash, partial_hash, root_hash
from .index import PrefixIndex
from .state import CacheState
from .tables import BlockTables


def check_invariants(state: CacheState, tables: BlockTables | Sequence[BlockTables]) -> None:
    """Check a state against all the tables that refer to it, on the host.

    1. `ref_count[b]` is the number of live table entries that point at b.
    2. free + cached + active + null = P, and no block is in two states.
    3. An indexed block's parent is indexed and full (no orphans), in its namespace; an ancestor
       of a referenced block is referenced; what decides eviction never grows from a cached parent
       to its child, so leaves go first.
    4. The bucket lists hold exactly the indexed blocks, each under its own keys.
    5. (namespace, parent, tokens) names at most one block.
    6. With no live table entry there is no active block (follows from 1).
    7. No more blocks are pinned than the budget allows.

    Raises:
        InvariantViolation: naming the invariant and a block that breaks it.
    """
    tables = [tables] if isinstance(tables, BlockTables) else list(tables)
    host: CacheState = jax.tree.map(np.asarray, state)
    refs, index = np.asarray(host.pool.ref_count), host.index
    _check_references(refs, tables)
    _check_states(refs, host, np.asarray(index.indexed))
    _check_forest(refs, index)
    hashes = np.asarray(index.hash)
    _check_buckets(index, index.by_hash, hashes)
    keys = child_key(index.parent, index.namespace, index.tokens[:, 0])
    _check_buckets(index, index.by_parent, np.asarray(keys))
    _check_hashes(index, hashes)
    pinned = int(np.sum(index.indexed & (index.pin_until > host.now)))
    if pinned > int(host.pin_budget):
        _fail("7 pins", f"{pinned} blocks are pinned and the budget is {int(host.pin_budget)}")


def _fail(invariant: str, message: str) -> None:
    raise InvariantViolation(f"{invariant}: {message}")


def _check_references(refs: np.ndarray, tables: Sequence[BlockTables]) -> None:
    count = np.zeros_like(refs)
    for table in tables:
        ids, lens = np.asarray(table.block_ids), np.asarray(table.num_blocks)
        live = np.arange(ids.shape[1]) < lens[:, None]
        if (ids[live] == NULL_BLOCK).any() or (ids[~live] != NULL_BLOCK).any():
            _fail("tables", "an entry is null within a table's length, or set past it")
        np.add.at(count, ids[live], 1)
    wrong = np.flatnonzero(count != refs)
    if wrong.size:
        b = wrong[0]
        _fail("1 references", f"block {b} has ref_count {refs[b]} and {count[b]} table entries")


def _check_states(refs: np.ndarray, state: CacheState, indexed: np.ndarray) -> None:
    free = np.asarray(state.pool.free_stack)[: int(state.pool.num_free)]
    if len(set(free.tolist())) != len(free):
        _fail("2 states", "a block is twice on the free stack")
    is_free = np.zeros(len(refs), bool)
    is_free[free] = True
    if is_free[NULL_BLOCK] or indexed[NULL_BLOCK] or refs[NULL_BLOCK]:
        _fail("2 states", "the null block is free, indexed or referenced")
    states = is_free.astype(int) + (indexed & (refs == 0)) + (refs > 0)
    states[NULL_BLOCK] = 1
    wrong = np.flatnonzero(states != 1)
    if wrong.size:
        b = wrong[0]
        _fail(
            "2 states",
            f"block {b} is free={is_free[b]} indexed={indexed[b]} ref_count={refs[b]}",
        )


def _check_forest(refs: np.ndarray, index: PrefixIndex) -> None:
    tokens, namespace = np.asarray(index.tokens), np.asarray(index.namespace)
    blocks = np.flatnonzero(index.indexed)
    parents = np.asarray(index.parent)[blocks]
    has_parent = parents != NULL_BLOCK
    child, parent = blocks[has_parent], parents[has_parent]
    orphans = child[np.asarray(index.num_tokens)[parent] != index.block_size]
    if orphans.size:
        _fail("3 no orphans", f"the parent of indexed block {orphans[0]} is not indexed and full")
    strays = child[namespace[child] != namespace[parent]]
    if strays.size:
        _fail("3 no orphans", f"block {strays[0]} is in another namespace than its parent")
    unheld = child[(refs[child] > 0) & (refs[parent] == 0)]
    if unheld.size:
        _fail("3 no orphans", f"block {unheld[0]} is referenced and its parent is not")
    idle = refs[parent] == 0
    for name in ("priority", "hits", "worth", "last_use", "last_access", "pin_until"):
        value = np.asarray(getattr(index, name))
        growing = child[idle & (value[child] > value[parent])]
        if growing.size:
            _fail("3 no orphans", f"{name} of cached block {growing[0]} exceeds its parent's")
    times = np.asarray(index.last_access)[blocks]
    if len(set(times.tolist())) != len(times) or (times >= index.clock).any():
        _fail("3 no orphans", "access times are not unique, or not before the clock")
    names = {
        (
            int(namespace[b]),
            int(index.parent[b]),
            int(index.num_tokens[b]),
            tokens[b].tobytes(),
        )
        for b in blocks
    }
    if len(names) != len(blocks):
        _fail("5 no duplicates", "two indexed blocks have one namespace, parent and tokens")


def _check_buckets(index: PrefixIndex, buckets: Buckets, keys: np.ndarray) -> None:
    seen: set[int] = set()
    own = np.asarray(bucket_of(jnp.asarray(keys), len(buckets.head)))
    indexed = np.asarray(index.indexed)
    for bucket in np.flatnonzero(buckets.head):
        block = int(buckets.head[bucket])
        while block != NULL_BLOCK:
            if block in seen or block < 0 or not indexed[block]:
                _fail("4 buckets", f"block {block} is listed twice or not indexed")
            if own[block] != bucket:
                _fail("4 buckets", f"block {block} is in a bucket that is not its key's")
            seen.add(block)
            block = int(buckets.next[block])
    missing = set(np.flatnonzero(indexed).tolist()) - seen
    if missing:
        _fail("4 buckets", f"indexed block {min(missing)} is in no bucket")


def _check_hashes(index: PrefixIndex, hashes: np.ndarray) -> None:
    roots = np.asarray(root_hash(index.namespace))
    before = np.where(np.asarray(index.parent) == NULL_BLOCK, roots, hashes[index.parent])
    extended = extend_hash(jnp.asarray(before), jnp.asarray(index.tokens))
    missing = jnp.asarray(index.block_size - index.num_tokens)
    wrong = np.asarray(index.indexed) & (np.asarray(partial_hash(extended, missing)) != hashes)
    if wrong.any():
        block = np.flatnonzero(wrong)[0]
        _fail("4 buckets", f"the hash of block {block} is not its parent's extended")
