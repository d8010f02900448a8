"""`paged_attention` in Pallas: one kernel for single queries, one for tiles of queries.

The backends are imported when they are called: importing octavo must not import Mosaic.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from ..chips import require_chip
from ..layout import NULL_BLOCK, safe_block_ids
from .arguments import AttentionOptions


class Decode(Protocol):
    """One query per sequence: `q [S, N, H]` -> `(out [S, N, H], lse float32[S, N])`.

    A context length of 0 marks an unused row, whose result is ignored.
    """

    def __call__(
        self,
        q: jax.Array,
        kv_cache: jax.Array,
        tables: jax.Array,
        context_lens: jax.Array,
        sinks: jax.Array | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]: ...


class Tiles(Protocol):
    """The sequences with several queries, packed: `q [T, N, H]` -> `(out, lse)`.

    Rows of other tokens may come back with anything in them.
    """

    def __call__(
        self,
        q: jax.Array,
        kv_cache: jax.Array,
        tables: jax.Array,
        context_lens: jax.Array,
        query_start: jax.Array,
        sinks: jax.Array | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]: ...


def attend_by_query_len(
    decode: Decode,
    tiles: Tiles,
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`.

    A sequence with one query runs in `decode` whatever the others do, so that its bits do not
    depend on them.
    """
    if options.batch_invariant:
        raise NotImplementedError("batch_invariant=True is for CPUs; the kernels use another order")
    num_tokens = q.shape[0]
    num_seqs, table_len = block_tables.shape
    block_size = kv_cache.shape[2]
    column = jnp.arange(table_len, dtype=jnp.int32)
    used = column < -(-context_lens[:, None] // block_size)
    tables = safe_block_ids(jnp.where(used, block_tables, NULL_BLOCK), kv_cache.shape[0])

    query_lens = jnp.diff(query_start)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    seq = jnp.minimum(owner, num_seqs - 1)

    single = query_lens == 1
    decode_out, decode_lse = decode(
        q[jnp.minimum(query_start[:-1], num_tokens - 1)],
        kv_cache,
        tables,
        jnp.where(single, context_lens, 0),
        sinks,
        options,
    )
    is_single = (owner < num_seqs) & single[seq]
    out = jnp.where(is_single[:, None, None], decode_out[seq], 0)
    lse = jnp.where(is_single[:, None], decode_lse[seq], -jnp.inf)
    if options.max_query_len == 1:
        return out, lse

    tiles_out, tiles_lse = tiles(q, kv_cache, tables, context_lens, query_start, sinks, options)
    in_tile = (owner < num_seqs) & (query_lens[seq] > 1)
    # NaN of a row that no tile wrote ends here.
    return (
        jnp.where(in_tile[:, None, None], tiles_out, out),
        jnp.where(in_tile[:, None], tiles_lse, lse),
    )


def paged_attention_mosaic_gpu(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`."""
    require_chip("gpu")
    from .mosaic_gpu.decode import decode
    from .mosaic_gpu.tiles import tiles

    return attend_by_query_len(
        decode, tiles, q, kv_cache, block_tables, context_lens, query_start, sinks, options
    )


def paged_attention_mosaic_tpu(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`."""
    require_chip("tpu")
    from .mosaic_tpu import decode, tiles

    return attend_by_query_len(
        decode, tiles, q, kv_cache, block_tables, context_lens, query_start, sinks, options
    )
