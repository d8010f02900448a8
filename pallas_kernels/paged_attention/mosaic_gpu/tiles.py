"""Ragged prefill and mixed batches on NVIDIA GPUs: the sequences with more than one query."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ...chips import current_chip, interpret_argument
from ..arguments import AttentionOptions
from .tiles_knobs import TilesKnobs, wgmma_knobs
from .tiles_load import Columns
from .tiles_plan import pack_queries, plan_tiles, unpack_rows


def tiles(
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    knobs: TilesKnobs | None = None,
) -> tuple[jax.Array, jax.Array]:
    from .tiles_wgmma import tiles_wgmma

    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = kv_cache.shape
    groups = num_heads // num_kv_heads
    chip = current_chip()
    knobs = knobs or wgmma_knobs(head_size, kv_cache.dtype.itemsize, chip)
    if interpret_argument() is not False:
        knobs = dataclasses.replace(knobs, weights_in_smem=True, stages=2)
    block_q = knobs.rows // groups
    pad = -tables.shape[1] % max(1, knobs.block_kv // block_size)
    tables = jnp.pad(tables, ((0, 0), (0, pad)))
    plan = plan_tiles(num_tokens, context_lens, query_start, options, block_q, knobs.block_kv)
    columns = Columns(head_size=head_size, parts=2 // kv_cache.dtype.itemsize)
    queries = q.astype(kv_cache.dtype if columns.parts == 1 else jnp.bfloat16)
    packed = pack_queries(columns.split_queries(queries), plan, num_kv_heads, knobs.rows)
    out, lse = tiles_wgmma(
        plan.table, tables, packed, columns.cache_words(kv_cache), options, columns, knobs,
        groups=groups, cache_dtype=kv_cache.dtype, interpret=interpret_argument(),
    )
    out = columns.join_values(unpack_rows(out, plan, num_heads))
    lse = unpack_rows(lse, plan, num_heads)
    if sinks is not None:
        total = jnp.logaddexp(lse, sinks)
        out, lse = out * jnp.exp(lse - total)[..., None], total
    return out.astype(q.dtype), lse
