"""Attention of a ragged batch of queries over a paged KV cache."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ..dispatch import MOSAIC_GPU, MOSAIC_TPU, NUMBA, REFERENCE, XLA, Op
from ..layout import check_cache, check_index_dtype, check_scales, debug_check_block_ids
from .arguments import AttentionOptions
from .numba import paged_attention_numba
from .pallas import paged_attention_mosaic_gpu, paged_attention_mosaic_tpu
from .reference import paged_attention_reference
from .xla import paged_attention_xla

_OP = Op(
    name="paged_attention",
    implementations={
        REFERENCE: paged_attention_reference,
        NUMBA: paged_attention_numba,
        XLA: paged_attention_xla,
        MOSAIC_GPU: paged_attention_mosaic_gpu,
        MOSAIC_TPU: paged_attention_mosaic_tpu,
    },
)


def paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    *,
    max_query_len: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of packed queries against their sequences' blocks.

    One call serves decode (a query per sequence), prefill chunks and both mixed: sequence s
    owns the queries `q[query_start[s]:query_start[s+1]]`, and they are the *last* positions of
    its context, so query i of n sits at position `context_lens[s] - n + i` and sees the keys
    up to itself. The new keys must already be in the cache (`write_kv`). Query heads
    `k*G .. k*G+G-1` share KV head k.

    Only slots below the context length are read into the result. Slots past it inside a
    sequence's last block must hold finite numbers, as `write_kv` leaves them. Table entries
    past the context may hold anything; an id in use outside `[0, P)` is an error in debug
    mode and otherwise reads the null block.

    Args:
        q: `[T, N, H]`.
        kv_cache: `[P, K, B, ROW]`, key in `[:H]`, value in `[H:2H]` of a row.
        block_tables: `int32[S, M]` block ids.
        context_lens: `int32[S]` tokens in the cache, the queries' own included; 0 for an unused
            row.
        query_start: `int32[S+1]`, ascending; tokens from `query_start[S]` on are padding.
        max_query_len: static bound on queries per sequence; None means T. 1 says decode.
        causal: False lets every query see its sequence's whole context, as queries after a
            shared prefix see that prefix; not together with a window.
        scale: factor on the scores; None means `1/sqrt(H)`.
        sliding_window: positions a query sees, itself included; None means all.
        soft_cap: c of `c * tanh(score / c)`; None means off.
        sinks: `float32[N]` logits that take part in the softmax and carry no value; None means
            none. They count once: give them to one of several states that are merged.
        k_scale, v_scale: `float32[K]` of a quantised cache (int8, float8_e4m3fn): a number
            stands for itself times its head's scale. None means 1, which int8 refuses.
        batch_invariant: compute every query as if it were alone, in steps that its position
            decides: its bits then do not depend on what else is computed beside or before it, on
            a CPU (XLA promises nothing elsewhere). "numba" always does.
        implementation: None picks by platform; "mosaic_gpu", "mosaic_tpu", "numba" (CPUs, float32
            and bfloat16), "xla" or "reference". A named one never falls back.

    Returns:
        `(out [T, N, H] in q's dtype, lse float32[T, N])`. lse is the natural logarithm of the
        softmax denominator, for `merge_states`. Padding tokens get zeros and -inf.

    Raises:
        ValueError: shapes, dtypes or static options do not fit together.
        NotImplementedError: the named implementation cannot serve this call.

    Source: PagedAttention (arXiv:2309.06180) with the online softmax of arXiv:1805.02867.
    """
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [T, N, H]")
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = kv_cache.shape[1] if kv_cache.ndim == 4 else 0
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{q.shape=} must have a multiple of the KV heads of {kv_cache.shape=}")
    check_cache(kv_cache, num_kv_heads, head_size)
    if block_tables.ndim != 2 or context_lens.shape != block_tables.shape[:1]:
        raise ValueError(f"{block_tables.shape=} must be [S, M] and {context_lens.shape=} [S]")
    if query_start.shape != (context_lens.shape[0] + 1,):
        raise ValueError(f"{query_start.shape=} must be [S+1], S={context_lens.shape[0]}")
    check_index_dtype(block_tables=block_tables, context_lens=context_lens, query_start=query_start)
    if max_query_len is None:
        max_query_len = num_tokens
    if max_query_len < 1 and num_tokens:
        raise ValueError(f"{max_query_len=} must be at least 1")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{sliding_window=} must be at least 1")
    if sliding_window is not None and not causal:
        raise ValueError(f"{sliding_window=} needs causal=True: it counts from a query's position")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be positive")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"{sinks.shape=} must be [N], N={num_heads}")
    if scale is None:
        scale = 1.0 / math.sqrt(head_size)

    scales = check_scales(kv_cache, k_scale, v_scale)
    if not num_tokens:
        return jnp.zeros_like(q), jnp.zeros((0, num_heads), jnp.float32)

    block_size = kv_cache.shape[2]
    first_position = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * block_size
    debug_check_block_ids(
        block_tables, first_position[None, :] < context_lens[:, None], kv_cache.shape[0]
    )
    options = AttentionOptions(
        max_query_len=max_query_len,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=causal,
        batch_invariant=batch_invariant,
    )
    if scales is None:
        return _OP(
            implementation, q, kv_cache, block_tables, context_lens, query_start, sinks, options
        )
    # Keys' scales go into the queries and values' into the result, so that no kernel knows them.
    k_scale, v_scale = (jnp.repeat(scale, num_heads // num_kv_heads)[:, None] for scale in scales)
    q = (q.astype(jnp.float32) * k_scale).astype(q.dtype)
    out, lse = _OP(
        implementation, q, kv_cache, block_tables, context_lens, query_start, sinks, options
    )
    return (out.astype(jnp.float32) * v_scale).astype(out.dtype), lse
