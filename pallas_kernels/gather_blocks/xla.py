"""`gather_blocks` and `scatter_blocks` as one XLA gather or scatter of whole blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK


def gather_blocks_xla(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.gather_blocks`."""
    return kv_cache[block_ids]


def scatter_blocks_xla(kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""
    target = jnp.where(block_ids == NULL_BLOCK, kv_cache.shape[0], block_ids)
    return kv_cache.at[target].set(blocks, mode="drop")
