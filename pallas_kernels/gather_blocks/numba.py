"""`scatter_blocks` on CPUs: see `numba_call`."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered


def scatter_blocks_numba(
    kv_cache: jax.Array,
    block_ids: jax.Array,
    blocks: jax.Array,
    layer: int,
    sources: jax.Array | None,
) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""
    itemsize = kv_cache.dtype.itemsize
    if prod(kv_cache.shape[1:]) * itemsize % 8:
        raise NotImplementedError(f"{kv_cache.shape=}: a block must have a multiple of 8 bytes")
    result = jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype)
    call = jax.ffi.ffi_call(
        registered("gather_blocks"),
        result,
        vmap_method="sequential",
        input_output_aliases={0: 0},
    )
    numbers = jnp.array([layer, itemsize, num_threads()], jnp.int32)
    if sources is None:
        sources = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    return call(kv_cache, block_ids, sources, blocks, numbers)
