"""`gather_blocks` and `scatter_blocks` on GPU: a program per chunk of a block."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..chips import interpret_argument
from ..gpu_memory import check_gpu, chunks_of, move
from ..layout import NULL_BLOCK


def gather_blocks_mosaic_gpu(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.gather_blocks`."""
    check_gpu()
    num_elements = math.prod(kv_cache.shape[1:])
    chunk, layout = chunks_of(num_elements, kv_cache.dtype.itemsize)
    chunks = num_elements // chunk

    def body(
        block_ids: Any,  # int32[n]
        cache: Any,  # [P, C, chunk]
        blocks: Any,  # [n, C, chunk]
    ) -> None:
        i, c = jax.lax.axis_index("block"), jax.lax.axis_index("chunk")
        move(cache.at[block_ids[i], c], blocks.at[i, c], layout)

    blocks = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((block_ids.shape[0], chunks, chunk), kv_cache.dtype),
        grid=(block_ids.shape[0], chunks),
        grid_names=("block", "chunk"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret_argument(),
        kernel_name="octavo_gather_blocks",
    )(block_ids, kv_cache.reshape(-1, chunks, chunk))
    return blocks.reshape(-1, *kv_cache.shape[1:])


def scatter_blocks_mosaic_gpu(
    kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""
    check_gpu()
    num_elements = math.prod(kv_cache.shape[1:])
    chunk, layout = chunks_of(num_elements, kv_cache.dtype.itemsize)
    chunks = num_elements // chunk

    def body(
        block_ids: Any,  # int32[n]
        blocks: Any,  # [n, C, chunk]
        cache: Any,  # [P, C, chunk]
    ) -> None:
        i, c = jax.lax.axis_index("block"), jax.lax.axis_index("chunk")
        block_id = block_ids[i]

        @pl.when(block_id != NULL_BLOCK)
        def _() -> None:
            move(blocks.at[i, c], cache.at[block_id, c], layout)

    cache = jax.new_ref(kv_cache.reshape(-1, chunks, chunk))
    plgpu.kernel(
        body,
        out_type=(),
        grid=(block_ids.shape[0], chunks),
        grid_names=("block", "chunk"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret_argument(),
        kernel_name="octavo_scatter_blocks",
    )(block_ids, blocks.reshape(-1, chunks, chunk), cache)
    return jax.freeze(cache).reshape(kv_cache.shape)
