"""The checker of the block manager's invariants, for tests and debug mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pallas_kernels import NULL_BLOCK
from .cache import CacheState
from .errors import InvariantViolation
from .hashing import bucket_of, extend_hash, root_hash
from .tables import BlockTables


def check_invariants(state: CacheState, tables: BlockTables | Sequence[BlockTables]) -> None:
    """Check a state against all the tables that refer to it, on the host.

    1. `ref_count[b]` is the number of live table entries that point at b.
    2. free + cached + active + null = P, and no block is in two states.
    3. An indexed block's parent is indexed (no orphans), in its namespace, and older blocks are
       nearer to the leaves: an ancestor of a referenced block is referenced.
    4. The bucket lists hold exactly the indexed blocks, each under its own hash.
    5. (namespace, parent, tokens) names at most one block.
    6. With no live table entry there is no active block (follows from 1).

    Raises:
        InvariantViolation: naming the invariant and a block that breaks it.
    """
    tables = [tables] if isinstance(tables, BlockTables) else list(tables)
    refs = np.asarray(state.pool.ref_count)
    index = {
        name: np.asarray(getattr(state.index, name))
        for name in (
            "indexed",
            "tokens",
            "parent",
            "namespace",
            "hash",
            "last_access",
            "bucket_head",
            "bucket_next",
        )
    }
    _check_references(refs, tables)
    _check_states(refs, state, index["indexed"])
    _check_forest(refs, index, int(state.index.clock))
    _check_buckets(index)


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


def _check_forest(refs: np.ndarray, index: dict[str, np.ndarray], clock: int) -> None:
    blocks = np.flatnonzero(index["indexed"])
    parents = index["parent"][blocks]
    has_parent = parents != NULL_BLOCK
    child, parent = blocks[has_parent], parents[has_parent]
    orphans = child[~index["indexed"][parent]]
    if orphans.size:
        _fail("3 no orphans", f"the parent of indexed block {orphans[0]} is not indexed")
    strays = child[index["namespace"][child] != index["namespace"][parent]]
    if strays.size:
        _fail("3 no orphans", f"block {strays[0]} is in another namespace than its parent")
    unheld = child[(refs[child] > 0) & (refs[parent] == 0)]
    if unheld.size:
        _fail("3 no orphans", f"block {unheld[0]} is referenced and its parent is not")
    cached = refs[parent] == 0
    younger = child[cached & (index["last_access"][child] >= index["last_access"][parent])]
    if younger.size:
        _fail("3 no orphans", f"cached block {younger[0]} would be evicted after its parent")
    times = index["last_access"][blocks]
    if len(set(times.tolist())) != len(times) or (times >= clock).any():
        _fail("3 no orphans", "access times are not unique, or not before the clock")
    names = {
        (int(index["namespace"][b]), int(index["parent"][b]), index["tokens"][b].tobytes())
        for b in blocks
    }
    if len(names) != len(blocks):
        _fail("5 no duplicates", "two indexed blocks have one namespace, parent and tokens")


def _check_buckets(index: dict[str, np.ndarray]) -> None:
    seen: set[int] = set()
    for bucket, head in enumerate(index["bucket_head"]):
        block = int(head)
        while block != NULL_BLOCK:
            if block in seen or not index["indexed"][block]:
                _fail("4 buckets", f"block {block} is listed twice or not indexed")
            if int(bucket_of(index["hash"][block], len(index["bucket_head"]))) != bucket:
                _fail("4 buckets", f"block {block} is in a bucket that is not its hash's")
            seen.add(block)
            block = int(index["bucket_next"][block])
    missing = set(np.flatnonzero(index["indexed"]).tolist()) - seen
    if missing:
        _fail("4 buckets", f"indexed block {min(missing)} is in no bucket")
    for block in seen:
        parent = int(index["parent"][block])
        before = index["hash"][parent] if parent else root_hash(index["namespace"][block])
        if int(extend_hash(before, index["tokens"][block])) != int(index["hash"][block]):
            _fail("4 buckets", f"the hash of block {block} is not its parent's extended")
