"""The list of query tiles of a ragged batch, and the packing of queries and results by tile.

A tile is up to `block_q` neighbouring tokens of one sequence. Its G query heads of one KV head
make `block_q * G` rows (token-major), padded to the kernel's row count M, so that one kernel
serves every G and every offset, and no tile can write into a neighbour's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arguments import AttentionOptions

# Columns of a plan. Chunks are counted from the sequence's start; [FIRST, LAST) are read, at least
# one, and those in [FULL_BEGIN, FULL_END), never the last, are seen whole by every row.
SEQ, COUNT, POSITION, CONTEXT, FIRST, FULL_BEGIN, FULL_END, LAST, QUERIES = range(9)


class TilePlan(NamedTuple):
    """Where every tile lies, and which share of its keys each of its splits takes.

    Attributes:
        table: `int32[NT * splits, 9]`, a row per tile and split with the columns above; QUERIES is
            the tile. A split without keys has a COUNT of 0.
        rows: `int32[NT, block_q]` token of each of a tile's positions, inside `[0, T)`.
        tile: `int32[T]` tile of each token; meaningless for a token that no tile owns.
        slot: `int32[T]` its place in the tile.
    """

    table: jax.Array
    rows: jax.Array
    tile: jax.Array
    slot: jax.Array


def max_tiles(num_tokens: int, num_seqs: int, max_query_len: int, block_q: int) -> int:
    """Most tiles that sequences with more than one query can need."""
    longest = min(max_query_len, num_tokens)
    if longest < 2:
        return 0
    seqs = min(num_seqs, num_tokens // 2)
    return min((num_tokens + seqs * (block_q - 1)) // block_q, seqs * -(-longest // block_q))


def plan_tiles(
    num_tokens: int,
    context_lens: jax.Array,
    query_start: jax.Array,
    options: AttentionOptions,
    block_q: int,
    block_kv: int,
    num_chunks: int,
    splits: int,
) -> TilePlan:
    """Cut the sequences that have more than one query into tiles.

    A sequence's last tile sees the most keys and comes first, so that the heaviest work starts
    first and the lightest fills the gaps at the end. No tile reads past `num_chunks`, where
    its table ends, whatever the context length says.
    """
    num_seqs = context_lens.shape[0]
    num_tiles = max_tiles(num_tokens, num_seqs, options.max_query_len, block_q)
    query_lens = jnp.diff(query_start)
    seq_tiles = jnp.where(query_lens > 1, -(-query_lens // block_q), 0)
    tile_end = jnp.cumsum(seq_tiles, dtype=jnp.int32)

    index = jnp.arange(num_tiles - 1, -1, -1, dtype=jnp.int32)
    seq = _owner(tile_end, index)
    start = query_start[seq] + (index - (tile_end[seq] - seq_tiles[seq])) * block_q
    count = jnp.where(index < tile_end[-1], jnp.clip(query_start[seq + 1] - start, 0, block_q), 0)
    context = context_lens[seq]
    position = context - (query_start[seq + 1] - start)
    after = position + count if options.causal else context
    last = jnp.clip(-(-after // block_kv), 0, num_chunks)
    full_end = jnp.maximum((position + 1 if options.causal else context) // block_kv, 0)
    first = full_begin = jnp.zeros_like(last)
    if options.sliding_window is not None:
        first = jnp.maximum(position - options.sliding_window + 1, 0) // block_kv
        full_begin = -(-jnp.maximum(after - options.sliding_window, 0) // block_kv)
    first = jnp.minimum(first, jnp.maximum(last - 1, 0))
    last = jnp.maximum(last, first + 1)
    share = -(-(last - first) // splits)[:, None]
    split_first = first[:, None] + share * jnp.arange(splits, dtype=jnp.int32)
    split_last = jnp.minimum(split_first + share, last[:, None])
    count = jnp.where(split_first < split_last, count[:, None], 0)
    full_begin = jnp.clip(full_begin[:, None], split_first, split_last - 1)
    full_end = jnp.clip(full_end[:, None], full_begin, split_last - 1)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    each = (x[:, None] for x in (seq, position, context, tile))
    seq, position, context, tile = (jnp.broadcast_to(x, count.shape) for x in each)
    columns = (
        *(seq, count, position, context),
        *(split_first, full_begin, full_end, split_last, tile),
    )
    table = jnp.stack(columns, axis=-1).reshape(num_tiles * splits, -1)

    offset = jnp.arange(block_q, dtype=jnp.int32)
    rows = jnp.clip(start[:, None] + offset, 0, num_tokens - 1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = _owner(query_start[1:], token)
    place = token - query_start[owner]
    natural = tile_end[owner] - seq_tiles[owner] + place // block_q
    tile = jnp.clip(num_tiles - 1 - natural, 0, num_tiles - 1)
    plan = TilePlan(table, rows, tile, place % block_q)
    # Fused into the gathers, this arithmetic would be repeated for every number of q and out.
    return TilePlan(*lax.optimization_barrier(tuple(plan)))


def _owner(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The first entry of ascending `ends` above each index (the last one if none is)."""
    # All at once: a binary search would be a loop of small kernels on a GPU.
    owner = jnp.searchsorted(ends, index, side="right", method="compare_all")
    return jnp.minimum(owner.astype(jnp.int32), ends.shape[0] - 1)


def pack_queries(q: jax.Array, plan: TilePlan, num_kv_heads: int, num_rows: int) -> jax.Array:
    """Queries `[T, N, H]` as tiles `[NT, K, M, H]`; padding rows repeat other rows."""
    _, num_heads, head_size = q.shape
    groups = num_heads // num_kv_heads
    row = np.minimum(np.arange(num_rows), plan.rows.shape[1] * groups - 1)
    head = np.arange(num_kv_heads)[:, None] * groups + row % groups
    index = plan.rows[:, None, row // groups] * num_heads + head
    return _rows_of(q.reshape(-1, head_size), index)


def unpack_rows(rows: jax.Array, plan: TilePlan, num_heads: int, empty: float) -> jax.Array:
    """Rows `[NT * splits, K, M, ...]` as `[splits, T, N, ...]`; `empty` for splits without keys."""
    num_kv_heads, num_rows = rows.shape[1:3]
    groups = num_heads // num_kv_heads
    splits = rows.shape[0] // plan.rows.shape[0]
    head = np.arange(num_heads)
    program = plan.tile * splits + np.arange(splits, dtype=np.int32)[:, None]
    first = program * (num_kv_heads * num_rows) + plan.slot * groups
    index = first[..., None] + (head // groups * num_rows + head % groups)
    found = _rows_of(rows.reshape(-1, *rows.shape[3:]), index)
    if splits == 1:
        return found
    has_keys = _rows_of(plan.table[:, COUNT], program) > 0
    return jnp.where(has_keys.reshape(*program.shape, *(1,) * (found.ndim - 2)), found, empty)


def _rows_of(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds")
