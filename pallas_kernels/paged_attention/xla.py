"""`paged_attention` in plain XLA: an online softmax over chunks of gathered blocks.

Two loops, each with a trip count known only at run time, so that an absent kind of query costs
nothing and memory stays bounded by a chunk whatever the context length:

- sequences with one query (decode) run together, chunk by chunk up to the longest of them;
- sequences with more are cut into tiles of queries, each of which stops at its own causal limit.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK, safe_block_ids
from .arguments import AttentionOptions

# Gathered bytes of one decode chunk: past this the chunk falls out of a CPU's cache between the
# gather and the second product. Measured at 32 sequences of 1,056 tokens (9/3 heads, float32): 15
# ms with 1.5 MB, 19 with 3 MB, 39 with 6 MB.
_DECODE_CHUNK_BYTES = 3 << 19
_CHUNK_TOKENS = 256
# Queries of a tile: large ones for long stretches, small ones for what a hit leaves of a prompt.
_LARGE_TILE = 256
_SMALL_TILE = 32
# Of batch-invariant attention, whatever the number of queries: few, because decode pads to it.
_INVARIANT_TILE = 16


class _Softmax(NamedTuple):
    """Running softmax of rows: peak and total `float32[..., R]`, acc `float32[..., R, H]`."""

    peak: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], head_size: int) -> _Softmax:
        return cls(
            peak=jnp.full(shape, -jnp.inf, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            acc=jnp.zeros((*shape, head_size), jnp.float32),
        )

    def add(self, logits: jax.Array, v: jax.Array) -> _Softmax:
        """Fold in a chunk: `logits: float32[..., R, C]` (-inf where unseen), `v: [..., C, H]`."""
        peak = jnp.maximum(self.peak, jnp.max(logits, axis=-1))
        safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
        weights = jnp.exp(logits - safe[..., None])
        shrink = jnp.exp(self.peak - safe)
        value = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return _Softmax(
            peak=peak,
            total=self.total * shrink + jnp.sum(weights, axis=-1),
            acc=self.acc * shrink[..., None] + value,
        )

    def finish(self, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Normalise to `(out float32[..., R, H], lse float32[..., R])`."""
        safe = jnp.where(jnp.isneginf(self.peak), 0.0, self.peak)
        lse = safe + jnp.log(self.total)
        if sinks is None:
            divisor = jnp.where(self.total == 0, 1.0, self.total)
            return self.acc / divisor[..., None], lse
        lse = jnp.logaddexp(lse, sinks)
        return self.acc * jnp.exp(safe - lse)[..., None], lse


def paged_attention_xla(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`."""
    tables, result = tables_in_use(kv_cache, block_tables, context_lens), _empty_result(q)
    if options.batch_invariant:
        return _attend_tiles(result, q, kv_cache, tables, context_lens, query_start, sinks, options)
    if options.max_query_len > 1:
        result = _attend_tiles(
            result, q, kv_cache, tables, context_lens, query_start, sinks, options
        )
    return _decode(result, q, kv_cache, tables, context_lens, query_start, sinks, options)


def tables_in_use(
    kv_cache: jax.Array, block_tables: jax.Array, context_lens: jax.Array
) -> jax.Array:
    """Block tables in which every id may be read: those past the context are the null block's."""
    num_blocks, _, block_size, _ = kv_cache.shape
    used_blocks = -(-context_lens // block_size)
    column = jnp.arange(block_tables.shape[1], dtype=jnp.int32)
    ids = jnp.where(column < used_blocks[:, None], block_tables, NULL_BLOCK)
    return safe_block_ids(ids, num_blocks)


def _empty_result(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What padding tokens get."""
    return jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)


def _product_dtype(q: jax.Array, kv_cache: jax.Array) -> jnp.dtype:
    """The cache's dtype, or the queries' where it is quantised."""
    return kv_cache.dtype if kv_cache.dtype.itemsize > 1 else q.dtype


def _gather(kv_cache: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows `[..., K, C, ROW]` of the blocks `ids: int32[..., C/B]`."""
    rows = jnp.moveaxis(kv_cache[ids], -4, -3).astype(dtype)
    return rows.reshape(*rows.shape[:-3], rows.shape[-3] * rows.shape[-2], rows.shape[-1])


def _pad_columns(tables: jax.Array, chunk_blocks: int) -> jax.Array:
    # `dynamic_slice` moves a start that would run past the end, which would misplace keys.
    pad = -tables.shape[1] % chunk_blocks
    return jnp.pad(tables, ((0, 0), (0, pad)), constant_values=NULL_BLOCK)


def _decode(
    result: tuple[jax.Array, jax.Array],
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Fill `result` for the sequences that have exactly one query."""
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, width = kv_cache.shape
    num_seqs = tables.shape[0]
    token_bytes = num_seqs * num_kv_heads * width * kv_cache.dtype.itemsize
    chunk_tokens = min(_CHUNK_TOKENS, max(block_size, _DECODE_CHUNK_BYTES // token_bytes))
    chunk_blocks = max(1, chunk_tokens // block_size)
    chunk_tokens = chunk_blocks * block_size
    tables = _pad_columns(tables, chunk_blocks)

    is_decode = jnp.diff(query_start) == 1
    lens = jnp.where(is_decode, context_lens, 0)
    rows = q[jnp.minimum(query_start[:-1], num_tokens - 1)]
    dtype = _product_dtype(q, kv_cache)
    rows = rows.reshape(num_seqs, num_kv_heads, -1, head_size).astype(dtype)
    # Whole rows of the cache against queries with zeros where the values are: decode waits for
    # memory, and this reads each chunk once instead of slicing it into two.
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, width - head_size)))
    position = lens - 1
    first = jnp.int32(0)
    if options.sliding_window is not None:
        begin = jnp.maximum(lens - options.sliding_window, 0)
        start = jnp.where(lens > 0, begin, jnp.max(lens))
        first = jnp.min(start) // chunk_tokens
    last = -(-jnp.max(lens) // chunk_tokens)

    def chunk(i: jax.Array, softmax: _Softmax) -> _Softmax:
        ids = jax.lax.dynamic_slice_in_dim(tables, i * chunk_blocks, chunk_blocks, axis=1)
        kv = _gather(kv_cache, ids, dtype)
        scores = jnp.einsum("skgr,skcr->skgc", rows, kv, preferred_element_type=jnp.float32)
        key_position = i * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        seen = options.visible(key_position[None, :], position[:, None])
        return softmax.add(jnp.where(seen[:, None, None, :], options.logits(scores), -jnp.inf), kv)

    softmax = jax.lax.fori_loop(first, last, chunk, _Softmax.empty(rows.shape[:-1], width))
    out, lse = softmax.finish(_grouped(sinks, num_kv_heads))
    out = out[..., head_size : 2 * head_size]
    target = jnp.where(is_decode, query_start[:-1], num_tokens)
    out = out.reshape(num_seqs, num_heads, head_size).astype(q.dtype)
    lse = lse.reshape(num_seqs, num_heads)
    return (
        result[0].at[target].set(out, mode="drop"),
        result[1].at[target].set(lse, mode="drop"),
    )


def _attend_tiles(
    result: tuple[jax.Array, jax.Array],
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Fill `result` for the sequences that have more than one query, tile by tile.

    First large tiles, then small ones for what these would leave mostly empty. For all sequences,
    if the result must be batch-invariant: one shape of tile then serves all queries, each row of
    which is computed alike.
    """
    query_lens = jnp.diff(query_start)
    none = jnp.zeros_like(query_lens)
    if options.batch_invariant:
        parts = [(_INVARIANT_TILE, none, query_lens)]
    else:
        query_lens = jnp.where(query_lens > 1, query_lens, 0)
        tile = min(_LARGE_TILE, 1 << (options.max_query_len - 1).bit_length())
        in_large, parts = none, []
        if tile > _SMALL_TILE:
            # One that is more than half full is computed sooner than small ones in its place.
            in_large = jnp.minimum((query_lens + tile // 2 - 1) // tile * tile, query_lens)
            parts.append((tile, none, in_large))
        parts.append((min(tile, _SMALL_TILE), in_large, query_lens - in_large))

    # Tiles begin anywhere, and go past the last query.
    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, parts[0][0]), *((0, 0),) * (array.ndim - 1)))

    rest = (kv_cache, tables, context_lens, query_start, sinks, options)
    padded_q, padded = pad(q.astype(_product_dtype(q, kv_cache))), (pad(result[0]), pad(result[1]))
    for tile, first_query, num_queries in parts:
        padded = _tile_loop(padded, padded_q, *rest, first_query, num_queries, tile)
    return padded[0][: q.shape[0]], padded[1][: q.shape[0]]


def _tile_loop(
    padded: tuple[jax.Array, jax.Array],
    padded_q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    first_query: jax.Array,
    num_queries: jax.Array,
    tile: int,
) -> tuple[jax.Array, jax.Array]:
    """Fill `result` for some queries of each sequence, in tiles of as many.

    Args:
        padded: `result`, with rows to spare.
        padded_q: the queries, as many.
        first_query: `int32[S]`, counted from a sequence's first one.
        num_queries: `int32[S]`.
        tile: queries computed at once.
        (others): see `paged_attention_xla`.
    """
    _, num_heads, head_size = padded_q.shape
    _, num_kv_heads, block_size, _ = kv_cache.shape
    groups = num_heads // num_kv_heads
    chunk_blocks = max(1, _CHUNK_TOKENS // block_size)
    chunk_tokens = chunk_blocks * block_size
    tables = _pad_columns(tables, chunk_blocks)

    query_lens = jnp.diff(query_start)
    tile_end = jnp.cumsum(-(-num_queries // tile))
    row_sinks = _grouped(sinks, num_kv_heads)
    if row_sinks is not None:
        row_sinks = jnp.tile(row_sinks[:, None, :], (1, tile, 1)).reshape(num_kv_heads, -1)

    def one_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq = jnp.searchsorted(tile_end, i, side="right").astype(jnp.int32)
        before = tile_end[seq] - -(-num_queries[seq] // tile)
        first_index = first_query[seq] + (i - before) * tile
        start = query_start[seq] + first_index
        count = jnp.minimum(tile, first_query[seq] + num_queries[seq] - first_index)
        row = jnp.arange(tile, dtype=jnp.int32)
        position = options.query_position(context_lens[seq], query_lens[seq], first_index + row)
        position = jnp.broadcast_to(position, row.shape)

        # [tile, N, H] -> [K, tile*G, H]
        rows = jax.lax.dynamic_slice_in_dim(padded_q, start, tile, axis=0)
        rows = rows.reshape(tile, num_kv_heads, groups, head_size).swapaxes(0, 1)
        rows = rows.reshape(num_kv_heads, tile * groups, head_size)
        row_position = jnp.repeat(position, groups)
        first = jnp.int32(0)
        if options.sliding_window is not None:
            first = jnp.maximum(position[0] - options.sliding_window + 1, 0) // chunk_tokens
        last = -(-(position[count - 1] + 1) // chunk_tokens)

        def add(j: jax.Array, softmax: _Softmax, *, masked: bool) -> _Softmax:
            ids = jax.lax.dynamic_slice(tables, (seq, j * chunk_blocks), (1, chunk_blocks))[0]
            kv = _gather(kv_cache, ids, padded_q.dtype)
            k, v = kv[..., :head_size], kv[..., head_size : 2 * head_size]
            scores = jnp.einsum("krh,kch->krc", rows, k, preferred_element_type=jnp.float32)
            logits = options.logits(scores)
            if masked:
                key_position = j * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
                seen = options.visible(key_position[None, :], row_position[:, None])
                logits = jnp.where(seen[None], logits, -jnp.inf)
            return softmax.add(logits, v)

        softmax = _Softmax.empty((num_kv_heads, tile * groups), head_size)
        if options.sliding_window is None and not options.batch_invariant:
            first = (position[0] + 1) // chunk_tokens
            softmax = jax.lax.fori_loop(0, first, partial(add, masked=False), softmax)
        softmax = jax.lax.fori_loop(first, last, partial(add, masked=True), softmax)
        out, lse = softmax.finish(row_sinks)
        out = out.reshape(num_kv_heads, tile, groups, head_size).swapaxes(0, 1)
        out = out.reshape(tile, num_heads, head_size).astype(padded[0].dtype)
        lse = lse.reshape(num_kv_heads, tile, groups).swapaxes(0, 1).reshape(tile, num_heads)
        own = row < count

        def put(array: jax.Array, new: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(array, start, tile, axis=0)
            keep = own.reshape(tile, *(1,) * (new.ndim - 1))
            return jax.lax.dynamic_update_slice_in_dim(
                array, jnp.where(keep, new, old), start, axis=0
            )

        return put(carry[0], out), put(carry[1], lse)

    return jax.lax.fori_loop(0, tile_end[-1], one_tile, padded)


def _grouped(sinks: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    """Sinks as `float32[K, G]`."""
    return None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
