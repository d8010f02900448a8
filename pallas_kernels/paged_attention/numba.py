"""`paged_attention` for CPUs with Numba, which reads the blocks where they lie.

XLA must gather them first, which takes longer than everything else in a decode step but the
products; and its attention to long contexts reaches half the speed of its products.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered
from .arguments import AttentionOptions


def paged_attention_numba(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    prefixes: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `octavo.pallas_kernels.paged_attention`.

    `prefixes` are the lists of `SharedPrefixes`, whose whole spans a group's tiles attend to; each
    sequence has one query then. No bit depends on them.
    """
    if not {q.dtype.name, kv_cache.dtype.name} <= {"float32", "bfloat16"}:
        message = f"{q.dtype=} and {kv_cache.dtype=} must be float32 or bfloat16"
        raise NotImplementedError(message)
    if sinks is not None or options.soft_cap is not None:
        raise NotImplementedError("sinks and soft_cap are not supported")
    if kv_cache.shape[2] % 4 or q.shape[2] % 4:
        raise NotImplementedError(
            f"{kv_cache.shape=} must have blocks, and {q.shape=} heads, of a multiple of 4"
        )
    name = registered("paged_attention", kv_cache.dtype.name)
    from .numba_decode import blocks_of_span

    (num_tokens, num_heads, head_size), (num_seqs, table_len) = q.shape, block_tables.shape
    span_blocks = blocks_of_span(kv_cache.shape[2], table_len)
    slots = (num_seqs, -(-table_len // span_blocks), num_heads, head_size + 2)
    shapes = (q.shape, (num_tokens, num_heads), slots)
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    if prefixes is None:
        prefixes = [jnp.zeros(0, jnp.int32)] * 5
    call = jax.ffi.ffi_call(name, results, vmap_method="sequential")
    scale = jnp.full(1, options.scale, jnp.float32)
    numbers = [options.sliding_window or 0, span_blocks, num_threads()]
    numbers = jnp.array([*numbers, options.causal], jnp.int32)
    lists = (block_tables, context_lens, query_start)
    out, lse, _ = call(q.astype(jnp.float32), kv_cache, *lists, scale, numbers, *prefixes)
    return out.astype(q.dtype), lse
