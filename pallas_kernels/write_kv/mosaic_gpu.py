"""`write_kv` on GPU: one program per token stores its row, and zeroes the rows after it.

A token of a block that this call opens zeroes the rows between itself and the block's next token,
so that no two programs touch one row and none waits for another.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..chips import interpret_argument
from ..gpu_memory import THREADS, VECTOR_BYTES, check_gpu, move, store

_LANES = 32
_WARPS = THREADS // _LANES


def write_kv_mosaic_gpu(
    kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    check_gpu()
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    if width % _LANES:
        raise NotImplementedError(f"rows of {width} elements are not a multiple of {_LANES} on GPU")
    layout = _row_layout(num_kv_heads, width, kv_cache.dtype.itemsize)

    def body(
        block_gmem: Any,  # int32[T]
        offset_gmem: Any,  # int32[T]
        end_gmem: Any,  # int32[T]
        new_gmem: Any,  # [T, K, ROW]
        cache_gmem: Any,  # [P, K, B, ROW]
    ) -> None:
        token = jax.lax.axis_index("token")
        block, offset = block_gmem[token], offset_gmem[token]

        @pl.when(block > 0)
        def _() -> None:
            move(new_gmem.at[token], cache_gmem.at[block, :, offset], layout)

            @pl.loop(offset + 1, end_gmem[token])
            def _(row: jax.Array) -> None:
                zeros = plgpu.layout_cast(jnp.zeros((num_kv_heads, width), kv_cache.dtype), layout)
                store(cache_gmem.at[block, :, row], zeros)

    new = jnp.concatenate([k, v], axis=-1).astype(kv_cache.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, width - new.shape[-1])))
    cache = jax.new_ref(kv_cache)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(slots.shape[0],),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret_argument(),
        kernel_name="octavo_write_kv",
    )(*_plan(slots, num_blocks, block_size), new, cache)
    return jax.freeze(cache)


def _plan(
    slots: jax.Array, num_blocks: int, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token: its block (0 for one that writes nothing), its row, the end of its rows."""
    block, offset = slots // block_size, slots % block_size
    live = (block > 0) & (block < num_blocks)
    block = jnp.where(live, block, 0)
    # All pairs: cheaper than a sort's many launches up to many thousands of tokens.
    same_block = block[:, None] == block[None, :]
    opened = jnp.any(same_block & (offset == 0), axis=1)
    later = same_block & (offset[None, :] > offset[:, None])
    end = jnp.min(jnp.where(later, offset[None, :], block_size), axis=1)
    return block, offset, jnp.where(opened, end, 0)


def _row_layout(heads: int, width: int, itemsize: int) -> Any:
    """Registers of `[K, ROW]`: heads over warps as far as they go, a row over 32 lanes."""
    warps = math.gcd(heads, _WARPS)
    vector = math.gcd(width // _LANES, VECTOR_BYTES // itemsize)
    copies = () if warps == _WARPS else (plgpu.Replicated(_WARPS // warps),)
    tile = (_LANES * vector,) if warps == 1 else (warps, _LANES * vector)
    return plgpu.Layout.TILED(
        plgpu.Tiling((tile, (vector,))),
        warp_dims=copies if warps == 1 else (*copies, -3),
        lane_dims=(-2,),
        vector_dim=-1,
    )
