"""Decode on NVIDIA GPUs: one warpgroup per (sequence, split of its keys, KV head), with `mma`.

`mma` has tiles of 16 query rows, so that up to 16 query heads of one KV head waste little, and
its operands come from registers, where 8-bit caches are cheap to convert; Hopper's `wgmma` would
compute 64 rows. The four warps share the keys of a tile in the first product and the head's
columns in the second.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..arguments import AttentionOptions
from .knobs import DecodeKnobs
from .upcast import E4M3_EXPONENT, split_words

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static facts of one call. A word is 16 bits: one number, or two of an 8-bit cache.

    Attributes:
        groups: G.
        head_size: H.
        num_kv_heads: K.
        block_size: B.
        cache_dtype: of the stored numbers.
    """

    groups: int
    head_size: int
    num_kv_heads: int
    block_size: int
    cache_dtype: Any

    @property
    def parts(self) -> int:
        """Operands per word."""
        return 2 if self.cache_dtype.itemsize == 1 else 1

    @property
    def compute_dtype(self) -> Any:
        return self.cache_dtype if self.parts == 1 else jnp.dtype(jnp.bfloat16)

    @property
    def word_dtype(self) -> Any:
        return self.cache_dtype if self.parts == 1 else jnp.dtype(jnp.uint16)

    @property
    def head_words(self) -> int:
        return self.head_size // self.parts

    @property
    def row_words(self) -> int:
        return 2 * self.head_words

    @property
    def key_words(self) -> int:
        """Words read as a key, in steps of `mma`: past the key they meet zeros of Q."""
        return -(-self.head_words // 16) * 16

    @property
    def value_words(self) -> int:
        """Words read as a value, 8 for each warp: those before the value are not returned."""
        return -(-self.head_words // 32) * 32

    @property
    def rows(self) -> int:
        """Query rows of the products, R."""
        return -(-self.groups // 16) * 16

    @property
    def out_rows(self) -> int:
        """Rows written: at least G, and a whole number of words for each of 128 threads."""
        step = 128 // math.gcd(self.value_words, 128)
        return -(-self.groups // step) * step

    @property
    def swizzle_words(self) -> int:
        """Words of a row of a swizzled tile: keys and values must both start at a tile."""
        return math.gcd(self.key_words, self.row_words - self.value_words, 64)

    def fixed_bytes(self, tile: int) -> int:
        """Shared memory beside the stages: weights, output, what reductions and barriers take."""
        return self.rows * tile * 2 + self.rows * self.value_words * 4 + 4096


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
    copies = knobs.tile // min(geometry.block_size, knobs.tile)
    landed = plgpu.Barrier(num_arrivals=copies, num_barriers=knobs.stages)
    return {
        "kv_smem": _swizzled(
            (knobs.stages, knobs.tile, geometry.row_words),
            geometry.word_dtype,
            geometry.swizzle_words,
        ),
        "weights_smem": _swizzled(
            (geometry.rows, knobs.tile), geometry.compute_dtype, math.gcd(knobs.tile, 64)
        ),
        "out_smem": plgpu.SMEM((geometry.rows, geometry.value_words), jnp.float32),
        "landed": landed if use_tma else None,
    }


def _swizzled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
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
    dtype = geometry.compute_dtype
    lhs, rhs, acc_layout = (
        layout(dtype, m_warps=1)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    context_len = lens_ref[seq]
    window_start = jnp.int32(0)
    if options.sliding_window is not None:
        window_start = jnp.maximum(context_len - options.sliding_window, 0)
    begin, end = _split_tiles(window_start, context_len, split, tile, knobs.splits)

    def fetch(step: jax.Array, slot: jax.Array) -> None:
        _fetch_tile(
            tables_ref.at[seq], words_ref, kv_smem.at[slot], step, step < end, kv_head, geometry,
            tile, landed.at[slot] if use_tma else None,
        )  # fmt: skip

    for stage in range(stages):
        step = begin + stage
        if use_tma:
            pl.when(step < end)(functools.partial(fetch, step, stage))
        else:
            fetch(step, jnp.int32(stage))

    q = [
        plgpu.load(q_ref.at[seq, kv_head, part], layout=lhs, optimized=False)
        for part in range(geometry.parts)
    ]

    def operands(slot: jax.Array, start: int, width: int, transposed: bool) -> Any:
        ref = kv_smem.at[slot, :, pl.ds(start, width)]
        words = plgpu.load(ref.transpose((1, 0)) if transposed else ref, layout=rhs)
        if geometry.parts == 1:
            return (words,)
        return split_words(words, geometry.cache_dtype, rhs, interpreted=interpreted)

    def full(shape: tuple[int, ...], value: float) -> jax.Array:
        layout = acc_layout if len(shape) == 2 else acc_layout.reduce(1)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def across(row_values: jax.Array, width: int) -> jax.Array:
        spread = lax.broadcast_in_dim(row_values, (rows, width), [0])
        return plgpu.layout_cast(spread, acc_layout)

    product = _interpreted_mma if interpreted else plgpu.mma

    def step(i: jax.Array, carry: Any) -> Any:
        acc, peak, total = carry
        slot = lax.rem(i - begin, jnp.int32(stages))
        if use_tma:
            plgpu.barrier_wait(landed.at[slot])
        else:
            plgpu.wait_gmem_to_smem((stages - 1) * (tile // min(geometry.block_size, tile)))

        scores = full((rows, tile), 0.0)
        for q_part, keys in zip(q, operands(slot, 0, geometry.key_words, True), strict=True):
            scores = product(scores, q_part, keys)
        logits = _logits_base2(scores, options, _exponent(geometry, interpreted))
        position = plgpu.broadcasted_iota(jnp.int32, (rows, tile), 1, layout=acc_layout) + i * tile
        seen = (position >= window_start) & (position < context_len)
        logits = jnp.where(seen, logits, -jnp.inf)

        # Every step holds a key that is seen, so the peak is finite.
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits - across(new_peak, tile))
        # Summed over columns after the loop: that is a reduction across warps.
        total = total * across(shrink, tile) + weights
        # The layout of a product's result is not that of an operand; through memory it becomes one.
        _store(weights_smem, weights.astype(dtype))
        weights = plgpu.load(weights_smem, layout=lhs)
        start = geometry.row_words - geometry.value_words
        values = operands(slot, start, geometry.value_words, False)
        scaled = across(shrink, geometry.value_words)
        acc = tuple(product(a * scaled, weights, v) for a, v in zip(acc, values, strict=True))

        following = i + stages
        if use_tma:
            pl.when(following < end)(functools.partial(fetch, following, slot))
        else:
            fetch(following, slot)
        return acc, new_peak, total

    acc, peak, total = lax.fori_loop(
        begin,
        end,
        step,
        (
            (full((rows, geometry.value_words), 0.0),) * geometry.parts,
            full((rows,), -jnp.inf),
            full((rows, tile), 0.0),
        ),
    )
    if not use_tma:
        plgpu.wait_gmem_to_smem(0)
    total = jnp.sum(total, axis=1)
    _store(lse_ref.at[split, seq, kv_head], (peak + jnp.log2(total)) * _LN2)
    factor = 2.0 ** _exponent(geometry, interpreted) / jnp.where(total == 0, 1.0, total)
    out_shape = (geometry.out_rows, geometry.value_words)
    out_layout = plgpu.Layout.WG_STRIDED(out_shape, vec_size=math.gcd(math.prod(out_shape) // 128, 4))
    for part in range(geometry.parts):
        _store(out_smem, acc[part] * across(factor, geometry.value_words))
        out = plgpu.load(out_smem.at[pl.ds(0, geometry.out_rows)], layout=out_layout)
        _store(out_ref.at[split, seq, kv_head, part], out.astype(out_ref.dtype))


def _split_tiles(
    first_key: jax.Array, context_len: jax.Array, split: jax.Array, tile: int, splits: int
) -> tuple[jax.Array, jax.Array]:
    """Range of the tiles of one split, from its own sequence's keys alone."""
    first = lax.div(first_key, jnp.int32(tile))
    last = lax.div(context_len + (tile - 1), jnp.int32(tile))
    share = lax.div(last - first + (splits - 1), jnp.int32(splits))
    begin = first + split * share
    return begin, jnp.minimum(begin + share, last)


def _fetch_tile(
    table_ref: Any,  # int32[M]
    words_ref: Any,  # [P*K*B, row_words]
    tile_smem: Any,  # [tile, row_words]
    step: jax.Array,
    wanted: jax.Array,
    kv_head: jax.Array,
    geometry: Geometry,
    tile: int,
    landed: Any | None,
) -> None:
    """Start copying the blocks of a tile, or the part of a block that is one.

    Without a barrier the copies are counted, so that an unwanted tile must be copied as well: it
    is read from the null block.
    """
    block_size = geometry.block_size
    length = min(block_size, tile)
    last_column = table_ref.shape[0] - 1
    for copy in range(tile // length):
        first_row = step * tile + copy * length
        # A tile may reach past the table; what it reads there is masked.
        column = jnp.minimum(lax.div(first_row, jnp.int32(block_size)), last_column)
        block = table_ref[column]
        if landed is None:
            block = jnp.where(wanted, block, 0)
        offset = lax.rem(first_row, jnp.int32(block_size))
        source = (block * geometry.num_kv_heads + kv_head) * block_size + offset
        source_ref = words_ref.at[pl.ds(source, length)]
        target_ref = tile_smem.at[pl.ds(copy * length, length)]
        if landed is None:
            in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source_ref, target_ref, oob_mode=in_bounds)
        else:
            plgpu.copy_gmem_to_smem(source_ref, target_ref, landed)


def _exponent(geometry: Geometry, interpreted: bool) -> int:
    """Power of two by which the operands from the cache are too small."""
    is_e4m3 = geometry.cache_dtype == jnp.float8_e4m3fn
    return E4M3_EXPONENT if is_e4m3 and not interpreted else 0


def _logits_base2(scores: jax.Array, options: AttentionOptions, exponent: int) -> jax.Array:
    """Scaled and capped scores, times log2(e)."""
    scale = options.scale * 2.0**exponent
    if options.soft_cap is None:
        return scores * (scale * _LOG2E)
    # tanh by way of exp2: the hardware's own tanh is good for three digits only.
    power = jnp.exp2(scores * (scale / options.soft_cap * 2.0 * _LOG2E))
    return (1.0 - 2.0 / (power + 1.0)) * (options.soft_cap * _LOG2E)


def _interpreted_mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`plgpu.mma`, which interpret mode lacks."""
    exact = lax.Precision.HIGHEST
    return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=exact)


def _store(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value` without a check for a bank-conflict-free way, which some layouts lack."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # before JAX 0.12 that is what an assignment does
        ref[...] = value
