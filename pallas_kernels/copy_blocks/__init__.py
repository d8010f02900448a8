"""Copying whole blocks within a cache: copy-on-write and partial reuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..chips import require_chip
from ..dispatch import MOSAIC_GPU, MOSAIC_TPU, NUMBA, REFERENCE, XLA, Op
from ..gather_blocks.targets import distinct_targets
from ..layout import NULL_BLOCK, check_index_dtype, debug_check_block_ids, safe_block_ids
from .numba import copy_blocks_numba
from .reference import copy_blocks_reference
from .xla import copy_blocks_xla


# Mosaic is imported when it is called: importing octavo must not.
def _mosaic_gpu(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    require_chip("gpu")
    from .mosaic_gpu import copy_blocks_mosaic_gpu

    return copy_blocks_mosaic_gpu(kv_cache, src, dst)


def _mosaic_tpu(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    require_chip("tpu")
    from .mosaic_tpu import copy_blocks_mosaic_tpu

    return copy_blocks_mosaic_tpu(kv_cache, src, dst)


_OP = Op(
    name="copy_blocks",
    implementations={
        REFERENCE: copy_blocks_reference,
        XLA: copy_blocks_xla,
        NUMBA: copy_blocks_numba,
        MOSAIC_GPU: _mosaic_gpu,
        MOSAIC_TPU: _mosaic_tpu,
    },
)


def copy_blocks(
    kv_cache: jax.Array, src: jax.Array, dst: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Copy block `src[i]` to block `dst[i]` for every i; all reads happen before any write.

    A pair whose `dst` is the null block is padding and copies nothing. Ids outside `[0, P)`
    are an error in debug mode; otherwise such a `src` reads the null block and such a `dst`
    is dropped. Of pairs with the same `dst` the last counts.

    Args:
        kv_cache: `[P, K, B, ROW]`, donated by callers that want no copy of the cache.
        src, dst: `int32[n]` block ids.
        implementation: None picks by platform; "numba" (CPUs), "mosaic_gpu", "mosaic_tpu", "xla"
            or "reference". A named one never falls back.

    Returns:
        The cache, `[P, K, B, ROW]`.

    Raises:
        ValueError: `src` and `dst` differ in shape, are not vectors, or are not int32; the cache
            is not `[P, K, B, ROW]`.
        NotImplementedError: the named implementation cannot serve this call.
    """
    if kv_cache.ndim != 4:
        raise ValueError(f"{kv_cache.shape=} must be [P, K, B, ROW]")
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"{src.shape=} and {dst.shape=} must be equal vectors")
    check_index_dtype(src=src, dst=dst)
    num_blocks = kv_cache.shape[0]
    used = dst != NULL_BLOCK
    debug_check_block_ids(src, used, num_blocks)
    debug_check_block_ids(dst, used, num_blocks)
    if src.shape[0] == 0:
        return kv_cache
    src, dst = safe_block_ids(src, num_blocks), distinct_targets(dst, num_blocks)
    return _OP(implementation, kv_cache, src, jnp.where(src == dst, NULL_BLOCK, dst))
