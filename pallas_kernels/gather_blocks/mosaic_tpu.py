"""`gather_blocks` and `scatter_blocks` on TPU: one copy within HBM per block, many in flight."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..chips import interpret_argument
from ..layout import NULL_BLOCK
from ..tpu_memory import check_block, overlap_copies

_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
_HBM = pl.BlockSpec(memory_space=pl.ANY)


def gather_blocks_mosaic_tpu(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.gather_blocks`."""
    check_block(kv_cache, block_ids.shape[0])

    def body(
        block_ids: Any,  # int32[n]
        cache_hbm: Any,  # [P, K, B, ROW]
        blocks_hbm: Any,  # [n, K, B, ROW]
        semaphore: Any,
    ) -> None:
        def copy(i: jax.Array) -> Any:
            source = cache_hbm.at[block_ids[i]]
            return pltpu.make_async_copy(source, blocks_hbm.at[i], semaphore)

        overlap_copies(block_ids.shape[0], copy)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((*block_ids.shape, *kv_cache.shape[1:]), kv_cache.dtype),
        in_specs=[_SMEM, _HBM],
        out_specs=_HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        interpret=interpret_argument(),
        name="octavo_gather_blocks",
    )(block_ids, kv_cache)


def scatter_blocks_mosaic_tpu(
    kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""
    check_block(kv_cache, block_ids.shape[0])

    def body(
        block_ids: Any,  # int32[n]
        blocks_hbm: Any,  # [n, K, B, ROW]
        _: Any,  # the cache as it was
        cache_hbm: Any,  # [P, K, B, ROW]
        semaphore: Any,
    ) -> None:
        def copy(i: jax.Array) -> Any:
            target = cache_hbm.at[block_ids[i]]
            return pltpu.make_async_copy(blocks_hbm.at[i], target, semaphore)

        overlap_copies(block_ids.shape[0], copy, lambda i: block_ids[i] != NULL_BLOCK)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        in_specs=[_SMEM, _HBM, _HBM],
        out_specs=_HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={2: 0},
        interpret=interpret_argument(),
        name="octavo_scatter_blocks",
    )(block_ids, blocks, kv_cache)
