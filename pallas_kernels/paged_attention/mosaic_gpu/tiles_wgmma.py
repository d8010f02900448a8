"""Prefill tiles on Hopper: TMA, `wgmma`, two compute warpgroups and one that loads."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..arguments import AttentionOptions
from .tiles_knobs import TilesKnobs
from .tiles_load import Columns, Stream, load, load_and_upcast, swizzled
from .tiles_plan import CONTEXT, COUNT, FIRST, FULL_BEGIN, FULL_END, LAST, POSITION, QUERIES, SEQ
from .tiles_softmax import Softmax, add_scores, finish, over_rows, seen

_WG_ROWS = 64
_LAYOUT = plgpu.Layout.WGMMA
# Of a thread; two compute warpgroups and one that loads share 512.
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 224, 64


def tiles_wgmma(
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
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed tiles.

    Args:
        table: `int32[NT * splits, 9]` of a `TilePlan`.
        block_tables: `int32[S, M]`, wide enough for whole chunks.
        q: `[NT, K, R, W]` packed queries in the operands' dtype, R = knobs.rows.
        words: `[P, K, B, 2 * columns.words]`, the cache in 16-bit words.

    Returns:
        `(out [NT * splits, K, R, W] in q's dtype, lse float32[NT * splits, K, R])`; rows of the
        table without tokens leave theirs uninitialised.
    """
    num_kv_heads, num_rows, width = q.shape[1:]
    out_shape = (table.shape[0], num_kv_heads, num_rows, width)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            options=options,
            columns=columns,
            knobs=knobs,
            groups=groups,
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
        num_threads=knobs.rows // _WG_ROWS + 1,
        thread_name="wg",
        scratch_types=_scratch(columns, words.shape[2], q.dtype, knobs),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        interpret=interpret,
    )
    return kernel(table, block_tables, q, words)


def _scratch(columns: Columns, block_size: int, dtype: Any, knobs: TilesKnobs) -> dict[str, Any]:
    num_wgs = knobs.rows // _WG_ROWS
    tile = math.gcd(columns.box, 64)
    copies = knobs.block_kv // min(block_size, knobs.block_kv)
    ring = swizzled((knobs.stages, knobs.block_kv, columns.width), dtype, tile)
    freed = plgpu.Barrier(num_barriers=knobs.stages, num_arrivals=num_wgs)
    # An upcast chunk arrives from the warpgroup that made it, a copied one from every box.
    landed = plgpu.Barrier(
        num_barriers=knobs.stages, num_arrivals=copies if columns.parts == 1 else 1
    )
    scratch = {
        "q_smem": swizzled((num_wgs, _WG_ROWS, columns.width), dtype, tile),
        "lse_smem": plgpu.SMEM((num_wgs, _WG_ROWS), jnp.float32),
        "weights_smem": None,
        "words_ring": None,
        "k_ring": ring,
        "v_ring": ring,
        "q_landed": plgpu.Barrier(num_barriers=num_wgs),
        "words_landed": None,
        "k_landed": landed,
        "v_landed": landed,
        "k_freed": freed,
        "v_freed": freed,
        "turn": plgpu.Barrier(num_arrivals=num_wgs),
    }
    if knobs.weights_in_smem:
        weights_shape = (num_wgs, _WG_ROWS, knobs.block_kv)
        scratch["weights_smem"] = swizzled(weights_shape, dtype, tile)
    if columns.parts == 2:
        value_start = 2 * columns.words - columns.box
        shape = (knobs.words_units, knobs.block_kv, columns.box)
        scratch["words_ring"] = swizzled(shape, jnp.uint16, math.gcd(columns.box, value_start, 64))
        scratch["words_landed"] = plgpu.Barrier(num_barriers=knobs.words_units, num_arrivals=copies)
    return scratch


def _kernel(
    table_ref,  # [NT * splits, 9] int32
    block_tables_ref,  # [S, M] int32
    q_ref,  # [NT, K, R, W]
    kv_ref,  # [P, K, B, 2 * columns.words]
    out_ref,  # [NT * splits, K, R, W]
    lse_ref,  # [NT * splits, K, R] float32
    *,
    words_ring,  # [units, C, columns.box] uint16, or None
    words_landed,
    k_ring,  # [stages, C, W]
    v_ring,  # [stages, C, W]
    k_landed,
    v_landed,
    k_freed,
    v_freed,
    options: AttentionOptions,
    columns: Columns,
    knobs: TilesKnobs,
    groups: int,
    cache_dtype: Any,
    interpreted: bool,
    **compute_scratch,
):
    tile = lax.axis_index("tile")
    kv_head = lax.axis_index("kv_head")
    wg = lax.axis_index("wg")
    num_wgs = knobs.rows // _WG_ROWS
    end = 2 * columns.words
    keys = Stream(k_ring, k_landed, k_freed, pl.ds(0, columns.box))
    values = Stream(v_ring, v_landed, v_freed, pl.ds(end - columns.box, columns.box))

    @pl.when(table_ref[tile, COUNT] > 0)
    def _():
        @pl.when(wg < num_wgs)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute(
                tile,
                kv_head,
                wg,
                table_ref,
                q_ref,
                out_ref,
                lse_ref,
                keys,
                values,
                options=options,
                groups=groups,
                **compute_scratch,
            )

        @pl.when(wg == num_wgs)
        def _():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            chunks = table_ref[tile, SEQ], kv_head, table_ref[tile, FIRST], table_ref[tile, LAST]
            if columns.parts == 1:
                load(*chunks, block_tables_ref, kv_ref, (keys, values))
            else:
                load_and_upcast(
                    *chunks,
                    block_tables_ref,
                    kv_ref,
                    (keys, values),
                    words_ring,
                    words_landed,
                    cache_dtype,
                    interpreted=interpreted,
                )


def _compute(
    tile,
    kv_head,
    wg,
    table_ref,
    q_ref,
    out_ref,
    lse_ref,
    keys: Stream,
    values: Stream,
    *,
    q_smem,  # [wgs, 64, W]
    lse_smem,  # [wgs, 64] float32
    weights_smem,  # [wgs, 64, C] or None
    q_landed,
    turn,
    options: AttentionOptions,
    groups: int,
):
    num_wgs, _, width = q_smem.shape
    stages, block_kv, _ = keys.ring.shape
    scores_shape = (_WG_ROWS, block_kv)
    own_rows = pl.ds(wg * _WG_ROWS, _WG_ROWS)
    q_smem, lse_smem = q_smem.at[wg], lse_smem.at[wg]
    queries = table_ref[tile, QUERIES]
    plgpu.copy_gmem_to_smem(q_ref.at[queries, kv_head, own_rows], q_smem, q_landed.at[wg])

    first, last = table_ref[tile, FIRST], table_ref[tile, LAST]
    position, context = table_ref[tile, POSITION], table_ref[tile, CONTEXT]

    def mask_of(chunk):
        where = chunk, wg * _WG_ROWS, position, context
        return seen(scores_shape, *where, options, groups, _LAYOUT)

    def switch():
        # Called before and after products, by the last warpgroup once more before its first ones:
        # so they take turns at the tensor cores, and one's softmax hides the other's products.
        if num_wgs > 1:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def slot_of(chunk):
        return lax.rem(chunk - first, jnp.int32(stages))

    def multiply_keys(scores_ref, chunk):
        slot = slot_of(chunk)
        plgpu.barrier_wait(keys.landed.at[slot])
        plgpu.wgmma(scores_ref, q_smem, keys.ring.at[slot].transpose((1, 0)))

    def multiply_values(acc_ref, weights, chunk):
        slot = slot_of(chunk)
        plgpu.barrier_wait(values.landed.at[slot])
        plgpu.wgmma(acc_ref, weights, values.ring.at[slot])

    def run_products(shape, multiply, *args):
        def body(ref):
            multiply(ref, *args)
            return ref[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def products(acc, weights, chunk, *, has_next: bool):
        """Add the chunk's values to acc and, in one go, multiply the next chunk's keys."""
        if weights_smem is not None:
            return products_by_smem(acc, weights, chunk, has_next=has_next)
        zeros = plgpu.layout_cast(jnp.zeros(scores_shape, jnp.float32), _LAYOUT)
        acc, weights, zeros = lax.optimization_barrier((acc, weights, zeros))
        switch()

        def both(acc_ref, scores_ref=None):
            # The keys first: acc is rescaled while they are multiplied.
            if has_next:
                multiply_keys(scores_ref, chunk + 1)
            multiply_values(acc_ref, weights, chunk)
            switch()

        if has_next:
            return pl.run_state(lambda refs: both(*refs))(
                (plgpu.WGMMAAccumulatorRef.init(acc), plgpu.WGMMAAccumulatorRef.init(zeros))
            )
        return pl.run_state(both)(plgpu.WGMMAAccumulatorRef.init(acc)), None

    def products_by_smem(acc, weights, chunk, *, has_next: bool):
        own_weights = weights_smem.at[wg]
        own_weights[...] = weights
        plgpu.commit_smem()
        switch()
        scores = None
        if has_next:
            scores = run_products(scores_shape, multiply_keys, chunk + 1)
        acc += run_products(acc.shape, multiply_values, own_weights, chunk)
        switch()
        return acc, scores

    def step(chunk, carry, *, masked: bool, has_next: bool = True):
        acc, scores, state = carry
        mask = mask_of(chunk) if masked else None
        state, weights, shrink = add_scores(state, scores, mask, options, _LAYOUT)
        acc = acc * over_rows(shrink, acc.shape, _LAYOUT)
        acc, scores = products(acc, weights.astype(values.ring.dtype), chunk, has_next=has_next)
        plgpu.barrier_arrive(values.freed.at[slot_of(chunk)])
        if has_next:
            plgpu.barrier_arrive(keys.freed.at[slot_of(chunk + 1)])
        return acc, scores, state

    acc = plgpu.layout_cast(jnp.zeros((_WG_ROWS, width), jnp.float32), _LAYOUT)
    plgpu.barrier_wait(q_landed.at[wg])
    pl.when(wg == num_wgs - 1)(switch)
    scores = run_products(scores_shape, multiply_keys, first)
    switch()
    plgpu.barrier_arrive(keys.freed.at[0])
    carry = acc, scores, Softmax.empty(_WG_ROWS, _LAYOUT)
    full_begin, full_end = table_ref[tile, FULL_BEGIN], table_ref[tile, FULL_END]
    masked_step = functools.partial(step, masked=True)
    if options.sliding_window is not None:
        carry = lax.fori_loop(first, full_begin, masked_step, carry)
    carry = lax.fori_loop(full_begin, full_end, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(full_end, last - 1, masked_step, carry)
    acc: Any
    acc, _, state = masked_step(last - 1, carry, has_next=False)
    pl.when(wg == 0)(switch)

    inverse, lse = finish(state)
    q_smem[...] = (acc * over_rows(inverse, acc.shape, _LAYOUT)).astype(q_smem.dtype)
    lse_smem[...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem, out_ref.at[tile, kv_head, own_rows])
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[tile, kv_head, own_rows])
    plgpu.wait_smem_to_gmem(0)
