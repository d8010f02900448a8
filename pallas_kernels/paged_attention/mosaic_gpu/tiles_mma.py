# The kernels need the Mosaic GPU of JAX 0.12; type checkers also see the one of JAX 0.10.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

"""Prefill tiles on Ampere, Ada and Blackwell: one warpgroup, `mma`, double-buffered chunks.

Products read their operands from registers, which come from shared memory piece by piece, so
that the accumulators have the registers. The softmax weights never leave them: the result of one
product is laid out as the operand of the next.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu_memory import store
from ..arguments import AttentionOptions
from .tiles_knobs import TilesKnobs
from .tiles_load import Columns, swizzled, upcast
from .tiles_plan import CONTEXT, COUNT, FIRST, FULL_BEGIN, FULL_END, LAST, POSITION, QUERIES, SEQ
from .tiles_softmax import Softmax, add_scores, finish, over_rows, seen

_STEP = 16  # columns of one `mma` operand


def tiles_mma(
    table: jax.Array,
    block_tables: jax.Array,
    q: jax.Array,
    words: jax.Array,
    options: AttentionOptions,
    columns: Columns,
    knobs: TilesKnobs,
    *,
    groups: int,
    cache_dtype: Any,
    use_tma: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `tiles_wgmma`."""
    num_kv_heads, rows, width = q.shape[1:]
    out_shape = (table.shape[0], num_kv_heads, rows, width)
    _, _, block_size, row_words = words.shape
    copy_rows = min(block_size, knobs.block_kv)
    tile_words = mma_tile_words(columns, copy_rows, use_tma=use_tma)
    landed = plgpu.Barrier(num_barriers=knobs.stages, num_arrivals=knobs.block_kv // copy_rows)
    scratch: dict[str, Any] = {
        "q_smem": swizzled((rows, width), q.dtype, tile_words),
        "kv_ring": swizzled((knobs.stages, knobs.block_kv, row_words), words.dtype, tile_words),
        "q_landed": plgpu.Barrier() if use_tma else None,
        "kv_landed": landed if use_tma else None,
    }
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            options=options,
            columns=columns,
            groups=groups,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            copy_rows=copy_rows,
            tile_words=tile_words,
            cache_dtype=cache_dtype,
            interpreted=interpret is not False,
        ),
        out_type=(
            jax.ShapeDtypeStruct(out_shape, q.dtype),
            jax.ShapeDtypeStruct(out_shape[:3], jnp.float32),
        ),
        # The KV head runs fastest, so that the heaviest tiles of all heads start first.
        grid=out_shape[:2],
        grid_names=("tile", "kv_head"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    # Copies without TMA take slices of matrices only.
    return kernel(table, block_tables, q.reshape(-1, width), words.reshape(-1, row_words))


def mma_tile_words(columns: Columns, copy_rows: int, *, use_tma: bool) -> int:
    """Words of a row of a swizzled tile: keys and values both start at one.

    Raises:
        NotImplementedError: no tiling suits these heads and copies.
    """
    row_words = 2 * columns.words
    fits = math.gcd(columns.box, row_words - columns.box, row_words)
    for words in (32, 16):
        # Without TMA the four warps share the tiles of a copy.
        num_tiles = copy_rows // 8 * (row_words // words)
        if fits % words == 0 and (use_tma or num_tiles % 4 == 0):
            return words
    raise NotImplementedError(
        f"heads of {columns.head_size} in copies of {copy_rows} rows do not divide over four warps"
    )


def _kernel(
    table_ref,  # [NT * splits, 9] int32
    block_tables_ref,  # [S, M] int32
    q_ref,  # [NT * K * R, W]
    kv_ref,  # [P * K * B, 2 * columns.words]
    out_ref,  # [NT * splits, K, R, W]
    lse_ref,  # [NT * splits, K, R] float32
    *,
    q_smem,  # [R, W]
    kv_ring,  # [stages, C, 2 * columns.words]
    q_landed,  # barriers, with TMA
    kv_landed,
    options: AttentionOptions,
    columns: Columns,
    groups: int,
    num_kv_heads: int,
    block_size: int,
    copy_rows: int,
    tile_words: int,
    cache_dtype: Any,
    interpreted: bool,
):
    tile, kv_head = lax.axis_index("tile"), lax.axis_index("kv_head")
    stages, block_kv, row_words = kv_ring.shape
    rows, _ = q_smem.shape
    use_tma = kv_landed is not None
    lhs, rhs, acc_layout = (
        layout(q_smem.dtype)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    first, last = table_ref[tile, FIRST], table_ref[tile, LAST]
    seq = table_ref[tile, SEQ]
    multiply = _interpreted_mma if interpreted else plgpu.mma

    def copy(source, target, landed):
        if use_tma:
            plgpu.copy_gmem_to_smem(source, target, landed)
        else:
            in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source, target, oob_mode=in_bounds)

    def fetch(chunk, slot):
        for row in range(0, block_kv, copy_rows):
            position = chunk * block_kv + row
            block = block_tables_ref[seq, lax.div(position, jnp.int32(block_size))]
            start = (block * num_kv_heads + kv_head) * block_size
            if copy_rows < block_size:
                start += lax.rem(position, jnp.int32(block_size))
            target = kv_ring.at[slot, pl.ds(row, copy_rows)]
            landed = kv_landed.at[slot] if use_tma else None
            copy(kv_ref.at[pl.ds(start, copy_rows)], target, landed)

    def fetch_if_any(chunk, slot):
        if use_tma:
            pl.when(chunk < last)(lambda: fetch(chunk, slot))
        else:  # without barriers copies are counted, so that there must always be one
            fetch(lax.min(chunk, last - 1), slot)

    def operands(words):
        if columns.parts == 1:
            return (words,)
        return upcast(words, cache_dtype, rhs, interpreted=interpreted)

    def multiply_keys(slot):
        scores = plgpu.layout_cast(jnp.zeros((rows, block_kv), jnp.float32), acc_layout)
        for start in range(0, columns.box, tile_words):
            piece = kv_ring.at[slot, :, pl.ds(start, tile_words)].transpose((1, 0))
            for part, keys in enumerate(operands(plgpu.load(piece, layout=rhs))):
                of_part = pl.ds(part * columns.box + start, tile_words)
                scores = multiply(scores, plgpu.load(q_smem.at[:, of_part], layout=lhs), keys)
        return scores

    def multiply_values(acc, weights, slot):
        for start in range(0, block_kv, _STEP):
            piece = kv_ring.at[
                slot, pl.ds(start, _STEP), pl.ds(row_words - columns.box, columns.box)
            ]
            values = operands(plgpu.load(piece, layout=rhs))
            own = weights[:, start : start + _STEP]
            acc = tuple(multiply(a, own, v) for a, v in zip(acc, values, strict=True))
        return acc

    def step(chunk, carry, *, masked: bool):
        acc, state = carry
        slot = lax.rem(chunk - first, jnp.int32(stages))
        if use_tma:
            plgpu.barrier_wait(kv_landed.at[slot])
            plgpu.commit_smem()  # ordinary reads of a slot come before TMA's write into it
        else:
            plgpu.wait_gmem_to_smem((stages - 2) * (block_kv // copy_rows))
        # Into the slot of the chunk before, which every warp has left by now.
        ahead = chunk + (stages - 1)
        fetch_if_any(ahead, lax.rem(ahead - first, jnp.int32(stages)))
        mask = None
        if masked:
            where = chunk, 0, table_ref[tile, POSITION], table_ref[tile, CONTEXT]
            mask = seen((rows, block_kv), *where, options, groups, acc_layout)
        scores = multiply_keys(slot)
        state, weights, shrink = add_scores(state, scores, mask, options, acc_layout)
        acc = tuple(a * over_rows(shrink, a.shape, acc_layout) for a in acc)
        weights = weights.astype(q_smem.dtype)
        if not interpreted:
            weights = _as_operand(weights, acc_layout, lhs)
        acc = multiply_values(acc, weights, slot)
        return acc, state

    @pl.when(table_ref[tile, COUNT] > 0)
    def _():
        first_row = (table_ref[tile, QUERIES] * num_kv_heads + kv_head) * rows
        copy(q_ref.at[pl.ds(first_row, rows)], q_smem, q_landed)
        for stage in range(stages - 1):
            fetch_if_any(first + stage, jnp.int32(stage))
        if use_tma:
            plgpu.barrier_wait(q_landed)

        zeros = plgpu.layout_cast(jnp.zeros((rows, columns.box), jnp.float32), acc_layout)
        carry = (zeros,) * columns.parts, Softmax.empty(rows, acc_layout)
        full_begin, full_end = table_ref[tile, FULL_BEGIN], table_ref[tile, FULL_END]
        masked_step = functools.partial(step, masked=True)
        if options.sliding_window is not None:
            carry = lax.fori_loop(first, full_begin, masked_step, carry)
        carry = lax.fori_loop(full_begin, full_end, functools.partial(step, masked=False), carry)
        acc, state = lax.fori_loop(full_end, last, masked_step, carry)
        if not use_tma:
            plgpu.wait_gmem_to_smem(0)

        inverse, lse = finish(state)
        store(lse_ref.at[tile, kv_head], lse)
        for part, values in enumerate(acc):
            own = out_ref.at[tile, kv_head, :, pl.ds(part * columns.box, columns.box)]
            scaled = values * over_rows(inverse, values.shape, acc_layout)
            store(own, scaled.astype(out_ref.dtype))


def _interpreted_mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`plgpu.mma`, which interpret mode lacks."""
    exact = lax.Precision.HIGHEST
    return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=exact)


def _as_operand(weights: jax.Array, acc_layout: Any, lhs: Any) -> Any:
    """A product's 16-bit result as a left operand: every thread holds what it needs already."""
    from jax.experimental.mosaic import gpu as mgpu

    result = plgpu.ShapeDtypeStruct(weights.shape, weights.dtype, lhs)

    def rename(_: Any, array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        # Two neighbouring 8-column tiles of a result are one 16-column tile of an operand.
        layout = lhs.to_mgpu()
        registers = array.registers.reshape(layout.registers_shape(array.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(acc_layout,), return_type=result)
    return inline(rename)(weights)
