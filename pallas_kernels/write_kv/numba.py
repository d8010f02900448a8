"""`write_kv` on CPUs: blocks that open are overwritten with a zero one, and then rows are moved."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..gather_blocks.numba import move
from ..layout import NULL_BLOCK


def write_kv_numba(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    block, offset = slots // block_size, slots % block_size
    block = jnp.where((block >= 0) & (block < num_blocks), block, NULL_BLOCK)
    opened = jnp.where(offset == 0, block, NULL_BLOCK)
    zeros = jnp.zeros(kv_cache.shape[1:], kv_cache.dtype)
    cache = move(kv_cache, opened, zeros, jnp.zeros_like(opened), zeros.size)

    rows = jnp.concatenate([k, v], axis=-1).astype(cache.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[-1])))
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    row_ids = (block[:, None] * num_kv_heads + heads) * block_size + offset[:, None]
    row_ids = jnp.where(block[:, None] == NULL_BLOCK, NULL_BLOCK, row_ids).reshape(-1)
    return move(cache, row_ids, rows, jnp.arange(len(row_ids), dtype=jnp.int32), width)
