"""The obvious `paged_attention`: gather every key, one softmax, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..layout import safe_block_ids
from .arguments import AttentionOptions


def paged_attention_reference(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`. Memory is `O(T * M * B)`."""
    num_tokens, num_heads, head_size = q.shape
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    num_seqs, table_len = block_tables.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    is_padding = owner >= num_seqs
    seq = jnp.minimum(owner, num_seqs - 1)
    query_position = options.query_position(
        context_lens[seq], query_start[seq + 1] - query_start[seq], token - query_start[seq]
    )

    # [S, M, K, B, ROW] -> [S, K, M*B, ROW]
    rows = kv_cache[safe_block_ids(block_tables, num_blocks)].astype(jnp.float32)
    rows = jnp.moveaxis(rows, 2, 1).reshape(num_seqs, num_kv_heads, table_len * block_size, -1)
    key_position = jnp.arange(table_len * block_size, dtype=jnp.int32)
    in_context = key_position[None, :] < context_lens[:, None]
    rows = jnp.where(in_context[:, None, :, None], rows, 0.0)
    k, v = rows[..., :head_size], rows[..., head_size : 2 * head_size]

    q32 = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_size)
    exact = jax.lax.Precision.HIGHEST
    logits = options.logits(jnp.einsum("tkgh,tkch->tkgc", q32, k[seq], precision=exact))
    seen = in_context[seq] & options.visible(key_position[None, :], query_position[:, None])
    logits = jnp.where(seen[:, None, None, :] & ~is_padding[:, None, None, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.astype(jnp.float32).reshape(num_kv_heads, -1))
    lse = jnp.where(is_padding[:, None, None], -jnp.inf, lse)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("tkgc,tkch->tkgh", weights, v[seq], precision=exact)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(num_tokens, num_heads)
