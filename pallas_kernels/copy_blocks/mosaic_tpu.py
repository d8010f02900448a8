"""`copy_blocks` on TPU: copies within HBM, by way of a buffer only where a chain needs it."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..chips import interpret_argument
from ..layout import NULL_BLOCK
from ..tpu_memory import check_block, overlap_copies
from .overlap import chained

_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
_HBM = pl.BlockSpec(memory_space=pl.ANY)


def copy_blocks_mosaic_tpu(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.copy_blocks`."""
    check_block(kv_cache, 2 * src.shape[0])
    block = jax.ShapeDtypeStruct((*src.shape, *kv_cache.shape[1:]), kv_cache.dtype)
    cache, _ = pl.pallas_call(
        _kernel,
        out_shape=(jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), block),
        in_specs=[_SMEM, _SMEM, _SMEM, _HBM],
        out_specs=(_HBM, _HBM),
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={3: 0},
        interpret=interpret_argument(),
        name="octavo_copy_blocks",
    )(chained(src, dst), src, dst, kv_cache)
    return cache


def _kernel(
    is_chained: Any,  # int32[1]
    src: Any,  # int32[n]
    dst: Any,  # int32[n]
    old_hbm: Any,  # [P, K, B, ROW]
    cache_hbm: Any,  # [P, K, B, ROW], the same memory
    buffer_hbm: Any,  # [n, K, B, ROW]
    semaphore: Any,
) -> None:
    count = src.shape[0]

    def wanted(i: jax.Array) -> jax.Array:
        return dst[i] != NULL_BLOCK

    def direct(i: jax.Array) -> Any:
        return pltpu.make_async_copy(old_hbm.at[src[i]], cache_hbm.at[dst[i]], semaphore)

    def save(i: jax.Array) -> Any:
        return pltpu.make_async_copy(old_hbm.at[src[i]], buffer_hbm.at[i], semaphore)

    def restore(i: jax.Array) -> Any:
        return pltpu.make_async_copy(buffer_hbm.at[i], cache_hbm.at[dst[i]], semaphore)

    @pl.when(is_chained[0] == 0)
    def _() -> None:
        overlap_copies(count, direct, wanted)

    @pl.when(is_chained[0] == 1)
    def _() -> None:
        overlap_copies(count, save, wanted)
        overlap_copies(count, restore, wanted)
