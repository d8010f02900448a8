"""Ragged prefill and mixed batches on NVIDIA GPUs: the sequences with more than one query."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...chips import current_chip, interpret_argument
from ...tuning import tuned
from ..arguments import AttentionOptions
from .merge import merge_splits
from .tiles_knobs import TilesKnobs, tile_splits, tiles_knobs
from .tiles_load import Columns
from .tiles_mma import mma_tile_words, tiles_mma
from .tiles_plan import max_tiles, pack_queries, plan_tiles, unpack_rows
from .tiles_wgmma import tiles_wgmma

_CACHE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")


def tiles(
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    knobs: TilesKnobs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the queries of sequences that have more than one; other rows are garbage.

    A sequence's bits depend on its own inputs, on `knobs`, and, where those are not given, on the
    static shapes and the chip that they are derived from; never on the other sequences.

    Queries and results travel packed by tile, a tile's rows side by side. The packing is one pass
    over q and one over out (4TNH bytes each, at 8,192 tokens of 32 heads of 128 about 5 % of the
    time of the products), and lets one kernel serve every G, offset and order of columns.

    Args:
        q: `[T, N, H]`; query i of n of sequence s is row `query_start[s] + i`.
        kv_cache: `[P, K, B, 2H]` in bfloat16, float16, float8_e4m3fn or int8.
        tables: `int32[S, M]` block ids inside the pool, 0 past the context.
        context_lens: `int32[S]`.
        query_start: `int32[S+1]`, ascending.
        sinks: `float32[N]` logits without a value, or None.
        knobs: None means the heuristic's.

    Returns:
        `(out [T, N, H] in q's dtype, lse float32[T, N])`.

    Raises:
        NotImplementedError: this chip, this JAX or these shapes are not served.

    Source: FlashAttention-2 and 3 (arXiv:2307.08691, arXiv:2407.08608).
    """
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = kv_cache.shape
    groups = num_heads // num_kv_heads
    chip = current_chip()
    _check(kv_cache, head_size)
    columns = Columns(head_size=head_size, parts=2 // kv_cache.dtype.itemsize)
    if knobs is None:
        guess = tiles_knobs(columns, chip)
        max_context = tables.shape[1] * block_size
        if groups <= guess.rows:
            splits = tile_splits(guess, num_tokens, groups, num_kv_heads, max_context, chip)
            guess = dataclasses.replace(guess, splits=splits)
        knobs = tuned(
            "mosaic_gpu.tiles",
            chip,
            guess,
            num_kv_heads=num_kv_heads,
            groups=groups,
            head_size=head_size,
            block_size=block_size,
            dtype=kv_cache.dtype.name,
        )
    interpret = interpret_argument()
    if interpret is not False:
        knobs = dataclasses.replace(knobs, weights_in_smem=True)
    use_wgmma = chip.arch == (9, 0)
    _check_knobs(knobs, columns, groups, use_wgmma=use_wgmma)
    kernel = tiles_wgmma
    if not use_wgmma:
        # Interpret mode has no other asynchronous copies.
        use_tma = chip.arch > (9, 0) or interpret is not False
        mma_tile_words(columns, min(block_size, knobs.block_kv), use_tma=use_tma)
        kernel = functools.partial(tiles_mma, use_tma=use_tma)
    block_q = knobs.rows // groups
    if max_tiles(num_tokens, context_lens.shape[0], options.max_query_len, block_q) == 0:
        return jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)

    num_chunks = max(1, -(-tables.shape[1] * block_size // knobs.block_kv))
    pad = -(-num_chunks * knobs.block_kv // block_size) - tables.shape[1]
    tables = jnp.pad(tables, ((0, 0), (0, pad)))
    plan = plan_tiles(
        num_tokens,
        context_lens,
        query_start,
        options,
        block_q,
        knobs.block_kv,
        num_chunks,
        knobs.splits,
    )
    queries = columns.split_queries(q.astype(columns.operand_dtype(kv_cache.dtype)))
    out, lse = kernel(
        plan.table,
        tables,
        pack_queries(queries, plan, num_kv_heads, knobs.rows),
        columns.cache_words(kv_cache),
        options,
        columns,
        knobs,
        groups=groups,
        cache_dtype=kv_cache.dtype,
        interpret=interpret,
    )
    out, lse = unpack_rows(out, plan, num_heads, 0), unpack_rows(lse, plan, num_heads, -jnp.inf)
    out, lse = (out[0], lse[0]) if knobs.splits == 1 else merge_splits(out.astype(jnp.float32), lse)
    out = columns.join_values(out)
    if sinks is not None:
        total = jnp.logaddexp(lse, sinks.astype(jnp.float32))
        out = out.astype(jnp.float32) * jnp.exp(lse - total)[..., None]
        lse = total
    return out.astype(q.dtype), lse


def _check(kv_cache: jax.Array, head_size: int) -> None:
    if not hasattr(plgpu, "mma"):
        raise NotImplementedError(f"JAX {jax.__version__} lacks plgpu.mma: 0.11.2 or later has it")
    dtype, block_size, row = kv_cache.dtype.name, *kv_cache.shape[2:]
    if dtype not in _CACHE_DTYPES:
        raise NotImplementedError(f"tensor cores take {', '.join(_CACHE_DTYPES)}, got a {dtype=}")
    if row != 2 * head_size:
        raise NotImplementedError(f"rows must be 2H={2 * head_size} wide on a GPU, got {row=}")
    if head_size % 16 or not 32 <= head_size <= 256:
        raise NotImplementedError(f"{head_size=} must be a multiple of 16 from 32 to 256")
    if block_size < 8 or block_size & (block_size - 1):
        raise NotImplementedError(f"{block_size=} must be a power of two of at least 8")


def _check_knobs(knobs: TilesKnobs, columns: Columns, groups: int, *, use_wgmma: bool) -> None:
    rows, block_kv = knobs.rows, knobs.block_kv
    least = 64 if use_wgmma else 16
    if rows not in (64, 128) or block_kv < least or block_kv & (block_kv - 1):
        raise ValueError(f"{rows=} must be 64 or 128, {block_kv=} a power of two from {least} on")
    if knobs.splits < 1:
        raise ValueError(f"{knobs=} need at least one split")
    if knobs.stages < 2 or (use_wgmma and columns.parts == 2 and knobs.words_units < 1):
        raise ValueError(f"{knobs=} need two stages, and with an 8-bit cache one unit of words")
    if groups > rows:
        raise NotImplementedError(f"{groups=} query heads per KV head exceed the {rows=} of a tile")
