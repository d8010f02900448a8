"""The attention of a layer with a paged cache, in one call."""

from __future__ import annotations

import jax

from ..pallas_kernels import paged_attention, shared_prefix_attention, write_kv
from .batch import PagedBatch


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's keys and values into the cache, and attend to all that is in it.

    What an attention layer calls in place of attention over its own inputs: causal, with as
    many query heads per KV head as the shapes say, for prompts, decode and both mixed.

    Args:
        q: `[T, N, H]`, positions encoded.
        k, v: `[T, K, H]`, positions encoded.
        kv_cache: `[P, K, B, ROW]`, this layer's; donate it to the step that calls the model.
        batch: whose tokens these are: see `packed_batch`. Shared prefixes that it names are
            read once for all, unless a sliding window hides the beginnings of contexts.
        scale, sliding_window, soft_cap, sinks, k_scale, v_scale: as for `paged_attention`.

    Returns:
        `(out [T, N, H], kv_cache)`.

    Raises:
        ValueError: shapes, dtypes or options do not fit together.
    """
    kv_cache = write_kv(kv_cache, k, v, batch.slots, k_scale=k_scale, v_scale=v_scale)
    options = {
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if batch.prefixes is not None and sliding_window is None:
        out, _ = shared_prefix_attention(
            q,
            kv_cache,
            batch.block_tables,
            batch.context_lens,
            batch.prefixes,
            batch_invariant=batch.batch_invariant,
            **options,
        )
        return out, kv_cache
    out, _ = paged_attention(
        q,
        kv_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_start,
        max_query_len=batch.max_query_len,
        sliding_window=sliding_window,
        batch_invariant=batch.batch_invariant,
        **options,
    )
    return out, kv_cache
