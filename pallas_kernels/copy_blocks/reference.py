"""The obvious `copy_blocks`: every read, then one write after the other."""

from __future__ import annotations

import jax

from ..gather_blocks.reference import gather_blocks_reference, scatter_blocks_reference


def copy_blocks_reference(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.copy_blocks`."""
    return scatter_blocks_reference(kv_cache, dst, gather_blocks_reference(kv_cache, src))
