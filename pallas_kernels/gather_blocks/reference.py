"""The obvious `gather_blocks` and `scatter_blocks`: one block after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK


def gather_blocks_reference(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.gather_blocks`."""
    return jax.lax.map(lambda block_id: kv_cache[block_id], block_ids)


def scatter_blocks_reference(
    kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""

    def put(cache: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        block_id, block = pair
        new = jnp.where(block_id == NULL_BLOCK, cache[block_id], block)
        return cache.at[block_id].set(new), None

    return jax.lax.scan(put, kv_cache, (block_ids, blocks))[0]
