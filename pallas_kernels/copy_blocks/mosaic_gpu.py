"""`copy_blocks` on GPU: a program per chunk of a block, and a second pass where a chain needs it.

Programs of one launch have no order, so what must be read before it is overwritten goes to a
buffer, and a second launch brings it back. Without a chain that launch ends at once.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..chips import interpret_argument
from ..gpu_memory import check_gpu, chunks_of, move
from ..layout import NULL_BLOCK
from .overlap import chained


def copy_blocks_mosaic_gpu(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.copy_blocks`."""
    check_gpu()
    num_elements = math.prod(kv_cache.shape[1:])
    chunk, layout = chunks_of(num_elements, kv_cache.dtype.itemsize)
    chunks = num_elements // chunk

    def first(
        is_chained: Any,  # int32[1]
        src: Any,  # int32[n]
        dst: Any,  # int32[n]
        cache: Any,  # [P, C, chunk]
        buffer: Any,  # [n, C, chunk]
    ) -> None:
        i, c = jax.lax.axis_index("block"), jax.lax.axis_index("chunk")
        target = dst[i]

        @pl.when((target != NULL_BLOCK) & (is_chained[0] == 0))
        def _() -> None:
            move(cache.at[src[i], c], cache.at[target, c], layout)

        @pl.when((target != NULL_BLOCK) & (is_chained[0] == 1))
        def _() -> None:
            move(cache.at[src[i], c], buffer.at[i, c], layout)

    def second(
        is_chained: Any,  # int32[1]
        dst: Any,  # int32[n]
        buffer: Any,  # [n, C, chunk]
        cache: Any,  # [P, C, chunk]
    ) -> None:
        i, c = jax.lax.axis_index("block"), jax.lax.axis_index("chunk")
        target = dst[i]

        @pl.when((target != NULL_BLOCK) & (is_chained[0] == 1))
        def _() -> None:
            move(buffer.at[i, c], cache.at[target, c], layout)

    def launch(body: Any, out_type: Any, name: str) -> Any:
        return plgpu.kernel(
            body,
            out_type=out_type,
            grid=(src.shape[0], chunks),
            grid_names=("block", "chunk"),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            interpret=interpret_argument(),
            kernel_name=name,
        )

    is_chained = chained(src, dst)
    cache = jax.new_ref(kv_cache.reshape(-1, chunks, chunk))
    packed = jax.ShapeDtypeStruct((src.shape[0], chunks, chunk), kv_cache.dtype)
    buffer = launch(first, packed, "octavo_copy_blocks")(is_chained, src, dst, cache)
    launch(second, (), "octavo_copy_blocks_chained")(is_chained, dst, buffer, cache)
    return jax.freeze(cache).reshape(kv_cache.shape)
