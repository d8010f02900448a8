"""One query per sequence on NVIDIA GPUs, its keys split over several programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...chips import current_chip, interpret_argument
from ...tuning import tuned
from ..arguments import AttentionOptions
from .decode_geometry import Geometry
from .decode_mma import decode_mma
from .knobs import MAX_TILE, DecodeKnobs, decode_knobs
from .merge import merge_splits

_CACHE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")


def decode(
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    knobs: DecodeKnobs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per sequence, at the last position of its context.

    A sequence's bits depend on its own inputs, on `knobs`, and, where those are not given, on the
    static shapes and the chip that they are derived from; never on the other sequences.

    Args:
        q: `[S, N, H]`.
        kv_cache: `[P, K, B, 2H]` in bfloat16, float16, float8_e4m3fn or int8.
        tables: `int32[S, M]` block ids inside the pool, 0 past the context.
        context_lens: `int32[S]`; 0 for an unused row, which gets out 0 and lse -inf.
        sinks: `float32[N]` logits without a value, or None.
        knobs: None means the measured ones, or the heuristic's.

    Returns:
        `(out [S, N, H] in q's dtype, lse float32[S, N])`.

    Raises:
        NotImplementedError: this chip, this JAX or these shapes are not served.
    """
    num_seqs, num_heads, head_size = q.shape
    num_kv_heads = kv_cache.shape[1]
    groups = num_heads // num_kv_heads
    _check(kv_cache, head_size, groups)
    chip, interpret = current_chip(), interpret_argument()
    geometry = Geometry(
        groups=groups,
        head_size=head_size,
        num_kv_heads=num_kv_heads,
        block_size=kv_cache.shape[2],
        cache_dtype=kv_cache.dtype,
        scaled_e4m3=interpret is False,
    )
    if knobs is None:
        guess = decode_knobs(
            num_seqs,
            num_kv_heads,
            tables.shape[1] * geometry.block_size,
            2 * geometry.row_words,
            geometry.fixed_bytes(MAX_TILE),
            chip,
        )
        knobs = tuned(
            "mosaic_gpu.decode",
            chip,
            guess,
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads,
            groups=groups,
            head_size=head_size,
            block_size=geometry.block_size,
            dtype=kv_cache.dtype.name,
        )
    _check_knobs(knobs, geometry)
    # Interpret mode has no asynchronous copies but those of TMA.
    use_tma = chip.arch >= (9, 0) or interpret is not False
    if not geometry.swizzle_words(knobs.tile, use_tma):
        raise NotImplementedError(
            f"{chip.name} has no TMA, and four warps cannot share the copy of a block of"
            f" {geometry.block_size} rows of {head_size=} in {kv_cache.dtype.name}"
        )
    is_final = knobs.splits == 1 and sinks is None
    out, lse = decode_mma(
        tables,
        context_lens,
        _query_words(q, geometry),
        _cache_words(kv_cache, geometry),
        options,
        geometry,
        knobs,
        out_dtype=q.dtype if is_final else jnp.float32,
        use_tma=use_tma,
        interpret=interpret,
    )
    out, lse = _head_rows(out, geometry), lse[..., :groups]
    out, lse = (out[0], lse[0]) if knobs.splits == 1 else merge_splits(out, lse)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:2])
    if sinks is not None:
        total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
        out, lse = out * jnp.exp(lse - total)[..., None], total
    return out.astype(q.dtype), lse


def _check(kv_cache: jax.Array, head_size: int, groups: int) -> None:
    if not hasattr(plgpu, "mma"):
        raise NotImplementedError(f"JAX {jax.__version__} lacks plgpu.mma: 0.11.2 or later has it")
    dtype, block_size, row = kv_cache.dtype.name, *kv_cache.shape[2:]
    if dtype not in _CACHE_DTYPES:
        raise NotImplementedError(f"tensor cores take {', '.join(_CACHE_DTYPES)}, got a {dtype=}")
    if row != 2 * head_size:
        raise NotImplementedError(f"rows must be 2H={2 * head_size} wide on a GPU, got {row=}")
    if head_size % 16 or not 32 <= head_size <= 256:
        raise NotImplementedError(f"{head_size=} must be a multiple of 16 from 32 to 256")
    most = 32 if head_size <= 128 else 16
    if groups > most:
        raise NotImplementedError(
            f"{groups=} query heads per KV head exceed {most}: registers would spill"
        )
    if block_size < 8 or block_size & (block_size - 1):
        raise NotImplementedError(f"{block_size=} must be a power of two of at least 8")


def _check_knobs(knobs: DecodeKnobs, geometry: Geometry) -> None:
    tile, block_size = knobs.tile, geometry.block_size
    if tile % 32 or (tile % block_size and block_size % tile):
        raise ValueError(f"{tile=} must be a multiple of 32, and of {block_size=} or divide it")
    if knobs.stages < 2 or knobs.splits < 1:
        raise ValueError(f"{knobs=} need at least two stages and one split")


def _query_words(q: jax.Array, geometry: Geometry) -> jax.Array:
    """Queries as operands `[S, K, parts, R, key_words]`, padded with zeros."""
    parts, words = geometry.parts, geometry.head_words
    q = (q * 2.0**geometry.query_exponent).astype(geometry.compute_dtype)
    q = q.reshape(q.shape[0], geometry.num_kv_heads, geometry.groups, words, parts)
    rows = (0, geometry.rows - geometry.groups)
    columns = (0, geometry.key_words - words)
    return jnp.pad(jnp.moveaxis(q, 4, 2), ((0, 0), (0, 0), (0, 0), rows, columns))


def _cache_words(kv_cache: jax.Array, geometry: Geometry) -> jax.Array:
    """The cache in 16-bit words `[P*K*B, row_words]`: another view of the same memory."""
    if geometry.parts == 1:
        return kv_cache.reshape(-1, geometry.row_words)
    pairs = kv_cache.reshape(-1, geometry.row_words, 2)
    return jax.lax.bitcast_convert_type(pairs, geometry.word_dtype)


def _head_rows(out: jax.Array, geometry: Geometry) -> jax.Array:
    """The kernel's output as `[splits, S, K, G, H]`."""
    out = out[..., : geometry.groups, geometry.value_words - geometry.head_words :]
    return jnp.moveaxis(out, 3, 5).reshape(*out.shape[:3], geometry.groups, geometry.head_size)
