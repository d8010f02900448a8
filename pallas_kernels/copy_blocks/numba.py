"""`copy_blocks` on CPUs: out of the cache, and in again."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from ..gather_blocks.numba import gather_blocks_numba, move


def copy_blocks_numba(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.copy_blocks`."""
    blocks = gather_blocks_numba(kv_cache, src)
    everyone = jnp.arange(len(blocks), dtype=jnp.int32)
    return move(kv_cache, dst, blocks, everyone, prod(kv_cache.shape[1:]))
