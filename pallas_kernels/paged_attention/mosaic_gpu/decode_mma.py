# The kernels need the Mosaic GPU of JAX 0.12; type checkers also see the one of JAX 0.10.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

"""Decode on NVIDIA GPUs: one warpgroup per (sequence, split of its keys, KV head), with `mma`.

`mma` has tiles of 16 query rows, so that up to 16 query heads of one KV head waste little, and
its operands come from registers, where 8-bit caches are cheap to convert; Hopper's `wgmma` would
compute 64 rows. The four warps share the keys of a tile in the first product and the head's
columns in the second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu_memory import store
from ...layout import NULL_BLOCK
from ..arguments import AttentionOptions
from .decode_geometry import Geometry
from .knobs import DecodeKnobs
from .upcast import split_words

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


def decode_mma(
    tables: jax.Array,
    context_lens: jax.Array,
    q: jax.Array,
    words: jax.Array,
    options: AttentionOptions,
    geometry: Geometry,
    knobs: DecodeKnobs,
    *,
    out_dtype: Any,
    use_tma: bool,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each split of each sequence, normalised within the split.

    Args:
        tables: `int32[S, M]` safe block ids.
        context_lens: `int32[S]`.
        q: `[S, K, parts, R, key_words]` in the compute dtype, zeros past G and past the head.
        words: `[P*K*B, row_words]`, the cache in words.

    Returns:
        `(out [splits, S, K, parts, out_rows, value_words], lse float32[splits, S, K, R])`. The
        last `head_words` columns of `out` are the result. A split without keys has out 0 and
        lse -inf.
    """
    num_seqs = context_lens.shape[0]
    shape = (knobs.splits, num_seqs, geometry.num_kv_heads)
    out_shape = (*shape, geometry.parts, geometry.out_rows, geometry.value_words)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            options=options,
            geometry=geometry,
            knobs=knobs,
            use_tma=use_tma,
            interpreted=interpret is not False,
        ),
        out_type=(
            jax.ShapeDtypeStruct(out_shape, out_dtype),
            jax.ShapeDtypeStruct((*shape, geometry.rows), jnp.float32),
        ),
        # The KV head runs fastest: its programs read neighbouring parts of the same blocks.
        grid=(num_seqs, knobs.splits, geometry.num_kv_heads),
        grid_names=("seq", "split", "kv_head"),
        scratch_types=_scratch(geometry, knobs, use_tma),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return kernel(tables, context_lens, q, words)


def _scratch(geometry: Geometry, knobs: DecodeKnobs, use_tma: bool) -> dict[str, Any]:
    copies = knobs.tile // geometry.copy_rows(knobs.tile)
    landed = plgpu.Barrier(num_arrivals=copies, num_barriers=knobs.stages)
    swizzle_words = geometry.swizzle_words(knobs.tile, use_tma)
    kv_shape = (knobs.stages, knobs.tile, geometry.row_words)
    return {
        "kv_smem": _swizzled(kv_shape, geometry.word_dtype, swizzle_words),
        "weights_smem": _swizzled(
            (geometry.rows, knobs.tile), geometry.compute_dtype, math.gcd(knobs.tile, 64)
        ),
        "out_smem": plgpu.SMEM((geometry.rows, geometry.value_words), jnp.float32),
        "landed": landed if use_tma else None,
    }


def _swizzled(shape: tuple[int, ...], dtype: Any, words: int) -> Any:
    gpu: Any = plgpu  # type checkers take the transforms for abstract classes
    transforms = (gpu.TilingTransform((8, words)), gpu.SwizzleTransform(2 * words))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    tables_ref: Any,  # int32[S, M]
    lens_ref: Any,  # int32[S]
    q_ref: Any,  # [S, K, parts, R, key_words]
    words_ref: Any,  # [P*K*B, row_words]
    out_ref: Any,  # [splits, S, K, parts, out_rows, value_words]
    lse_ref: Any,  # float32[splits, S, K, R]
    *,
    kv_smem: Any,  # [stages, tile, row_words]
    weights_smem: Any,  # [R, tile]
    out_smem: Any,  # float32[R, value_words]
    landed: Any,  # a barrier for each stage, with TMA
    options: AttentionOptions,
    geometry: Geometry,
    knobs: DecodeKnobs,
    use_tma: bool,
    interpreted: bool,
) -> None:
    seq, split, kv_head = (lax.axis_index(name) for name in ("seq", "split", "kv_head"))
    tile, stages, rows = knobs.tile, knobs.stages, geometry.rows
    lhs, rhs, product = _lhs(geometry), _rhs(geometry), _product(interpreted)
    context_len = lens_ref[seq]
    window_start = jnp.int32(0)
    if options.sliding_window is not None:
        window_start = jnp.maximum(context_len - options.sliding_window, 0)
    begin, end = _split_tiles(window_start, context_len, split, tile, knobs.splits)

    def sources(step: jax.Array) -> list[jax.Array]:
        return _tile_sources(tables_ref.at[seq], step, step < end, kv_head, geometry, tile)

    def fetch(rows_of: list[jax.Array], slot: jax.Array | int) -> None:
        length = geometry.copy_rows(tile)
        for copy, row in enumerate(rows_of):
            source_ref = words_ref.at[pl.ds(row, length)]
            target_ref = kv_smem.at[slot, pl.ds(copy * length, length)]
            if use_tma:
                plgpu.copy_gmem_to_smem(source_ref, target_ref, landed.at[slot])
            else:
                in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(source_ref, target_ref, oob_mode=in_bounds)

    def fetch_wanted(step: jax.Array, rows_of: list[jax.Array], slot: jax.Array | int) -> None:
        # `cp.async` is awaited by counting, so there an unwanted tile is copied as well.
        if use_tma:
            pl.when(step < end)(lambda: fetch(rows_of, slot))
        else:
            fetch(rows_of, slot)

    for stage in range(stages):
        fetch_wanted(begin + stage, sources(begin + stage), stage)

    q = [
        plgpu.load(q_ref.at[seq, kv_head, part], layout=lhs, optimized=False)
        for part in range(geometry.parts)
    ]

    def operands(words_smem: Any) -> tuple[jax.Array, ...]:
        words = plgpu.load(words_smem, layout=rhs)
        if geometry.parts == 1:
            return (words,)
        return split_words(words, geometry.cache_dtype, rhs, interpreted=interpreted)

    def step(i: jax.Array, carry: Any) -> Any:
        acc, peak, total = carry
        slot = lax.rem(i - begin, jnp.int32(stages))
        following = i + stages
        # Read here, block ids arrive while the tile is computed.
        following_sources = sources(following)
        if use_tma:
            plgpu.barrier_wait(landed.at[slot])
        else:
            plgpu.wait_gmem_to_smem((stages - 1) * len(following_sources))

        keys = kv_smem.at[slot, :, pl.ds(0, geometry.key_words)]
        scores = _full((rows, tile), 0.0, geometry)
        for q_part, k_part in zip(q, operands(keys.transpose((1, 0))), strict=True):
            scores = product(scores, q_part, k_part)
        exponent = geometry.kv_exponent - geometry.query_exponent
        logits = _logits_base2(scores, options, exponent)
        column = plgpu.broadcasted_iota(jnp.int32, (rows, tile), 1, layout=_acc(geometry))
        position = column + i * tile
        seen = (position >= window_start) & (position < context_len)
        logits = jnp.where(seen, logits, -jnp.inf)

        # Every tile holds a key that is seen, so the peak is finite.
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits - _across(new_peak, tile, geometry))
        # Summed over columns after the loop: that is a reduction across warps.
        total = total * _across(shrink, tile, geometry) + weights
        # The layout of a product's result is not that of an operand: through memory it becomes one.
        store(weights_smem, weights.astype(geometry.compute_dtype))
        weights = plgpu.load(weights_smem, layout=lhs)
        start = geometry.row_words - geometry.value_words
        values = operands(kv_smem.at[slot, :, pl.ds(start, geometry.value_words)])
        shrink = _across(shrink, geometry.value_words, geometry)
        acc = tuple(product(a * shrink, weights, v) for a, v in zip(acc, values, strict=True))

        if use_tma:
            # Orders the reads of this slot before the copy that overwrites it, which is made by
            # the asynchronous proxy.
            plgpu.commit_smem()
        fetch_wanted(following, following_sources, slot)
        return acc, new_peak, total

    state = (
        (_full((rows, geometry.value_words), 0.0, geometry),) * geometry.parts,
        _full((rows,), -jnp.inf, geometry),
        _full((rows, tile), 0.0, geometry),
    )
    acc, peak, total = lax.fori_loop(begin, end, step, state)
    if not use_tma:
        plgpu.wait_gmem_to_smem(0)
    total = jnp.sum(total, axis=1)
    store(lse_ref.at[split, seq, kv_head], (peak + jnp.log2(total)) * _LN2)
    factor = 2.0**geometry.kv_exponent / jnp.where(total == 0, 1.0, total)
    factor = _across(factor, geometry.value_words, geometry)
    for part in range(geometry.parts):
        _write_rows(out_ref.at[split, seq, kv_head, part], acc[part] * factor, out_smem, geometry)


def _split_tiles(
    first_key: jax.Array, context_len: jax.Array, split: jax.Array, tile: int, splits: int
) -> tuple[jax.Array, jax.Array]:
    """Range of the tiles of one split, from its own sequence's keys alone."""
    first = lax.div(first_key, jnp.int32(tile))
    last = lax.div(context_len + (tile - 1), jnp.int32(tile))
    share = lax.div(last - first + (splits - 1), jnp.int32(splits))
    begin = first + split * share
    return begin, jnp.minimum(begin + share, last)


def _tile_sources(
    table_ref: Any,  # int32[M]
    step: jax.Array,
    wanted: jax.Array,
    kv_head: jax.Array,
    geometry: Geometry,
    tile: int,
) -> list[jax.Array]:
    """First rows, in the cache, of the blocks of a tile, or of the part of a block that is one.

    A tile that is not wanted is in the null block.
    """
    block_size, length = geometry.block_size, geometry.copy_rows(tile)
    last_column = table_ref.shape[0] - 1
    starts = []
    for copy in range(tile // length):
        row = step * tile + copy * length
        # A tile may reach past the table; what it reads there is masked.
        column = jnp.minimum(lax.div(row, jnp.int32(block_size)), last_column)
        block = jnp.where(wanted, table_ref[column], NULL_BLOCK)
        start = (block * geometry.num_kv_heads + kv_head) * block_size
        starts.append(start + lax.rem(row, jnp.int32(block_size)))
    return starts


def _logits_base2(scores: jax.Array, options: AttentionOptions, exponent: int) -> jax.Array:
    """Scaled and capped scores, times log2(e); the scores come 2**-exponent too small."""
    scale = options.scale * 2.0**exponent
    if options.soft_cap is None:
        return scores * (scale * _LOG2E)
    # tanh by way of exp2: the hardware's own tanh is good for three digits only.
    power = jnp.exp2(scores * (scale / options.soft_cap * 2.0 * _LOG2E))
    return (1.0 - 2.0 / (power + 1.0)) * (options.soft_cap * _LOG2E)


def _write_rows(out_ref: Any, out: jax.Array, out_smem: Any, geometry: Geometry) -> None:
    """Write the first rows of `out: float32[R, value_words]`, which is held in tiles of 16."""
    store(out_smem, out)
    shape = (geometry.out_rows, geometry.value_words)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(math.prod(shape) // 128, 4))
    rows = plgpu.load(out_smem.at[pl.ds(0, geometry.out_rows)], layout=layout)
    store(out_ref, rows.astype(out_ref.dtype))


def _product(interpreted: bool) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """`(acc, a, b) -> acc + a @ b`; interpret mode lacks `plgpu.mma`."""
    if not interpreted:
        return plgpu.mma

    def product(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        exact = lax.Precision.HIGHEST
        return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=exact)

    return product


# One warp along the rows: 16 of them, and the four warps along the columns.
def _lhs(geometry: Geometry) -> Any:
    return plgpu.Layout.MMA_LHS(geometry.compute_dtype, m_warps=1)


def _rhs(geometry: Geometry) -> Any:
    return plgpu.Layout.MMA_RHS(geometry.compute_dtype, m_warps=1)


def _acc(geometry: Geometry) -> Any:
    return plgpu.Layout.MMA_ACC(geometry.compute_dtype, m_warps=1)


def _full(shape: tuple[int, ...], value: float, geometry: Geometry) -> jax.Array:
    layout = _acc(geometry) if len(shape) == 2 else _acc(geometry).reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _across(row_values: jax.Array, width: int, geometry: Geometry) -> jax.Array:
    """`float32[R]` over `width` columns."""
    spread = lax.broadcast_in_dim(row_values, (row_values.shape[0], width), [0])
    return plgpu.layout_cast(spread, _acc(geometry))
