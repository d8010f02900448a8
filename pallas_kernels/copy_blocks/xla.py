"""`copy_blocks` as an XLA gather and scatter of whole blocks."""

from __future__ import annotations

import jax

from ..gather_blocks.xla import gather_blocks_xla, scatter_blocks_xla


def copy_blocks_xla(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.copy_blocks`."""
    return scatter_blocks_xla(kv_cache, dst, gather_blocks_xla(kv_cache, src))
