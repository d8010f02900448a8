"""Prefill and mixed batches on TPU: tiles of queries against chunks of keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...chips import current_chip, interpret_argument
from ...tuning import tuned
from ..arguments import AttentionOptions
from .knobs import Sizes, TilesKnobs, default_tiles_knobs, vmem_limit
from .rows import RowParts, check_supported
from .tiles_load import BlockCopies, RowCopies, when
from .tiles_plan import Plan, outputs_of_words, query_words, tile_list
from .tiles_rows import pack_rows, unpack_rows
from .tiles_softmax import SUM_ROWS, Softmax, query_factor


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
    profile: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of sequences with several queries: see `octavo.pallas_kernels.paged_attention`.

    A grid step per tile of queries walks the keys that the tile sees in chunks, copied as in
    `decode`. Scores have keys on sublanes and queries (times the G heads that share a KV head)
    on lanes. Only the rows of a tile's own tokens are written.

    Queries are multiplied by the scale before they are rounded to what the matrix unit takes.

    A sequence's result depends on its own queries, context and the knobs, bit for bit.

    Args:
        q: `[T, N, H]`.
        kv_cache: `[P, K, B, ROW]`.
        tables: `int32[S, M]`, every id in `[0, P)`.
        context_lens: `int32[S]`.
        query_start: `int32[S+1]`.
        sinks: `float32[N]` or None.
        options: see `AttentionOptions`.
        knobs: None means the measured ones, or the heuristic's.
        profile: chunks that every tile is taken to have, so that a static profiler sees loops of
            known length. Never for results.

    Returns:
        `(out [T, N, H] in q's dtype, lse float32[T, N])`; rows of tokens of sequences with one
        query and of padding hold anything.

    Raises:
        NotImplementedError: the cache has a dtype, a shape or blocks that do not fit the chip.
    """
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, width = kv_cache.shape
    groups = num_heads // num_kv_heads
    chip = current_chip()
    sizes = Sizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        row_width=width,
        head_size=head_size,
        itemsize=kv_cache.dtype.itemsize,
    )
    if knobs is None:
        knobs = tuned(
            "mosaic_tpu.tiles",
            chip,
            default_tiles_knobs(sizes, options.max_query_len, chip),
            num_kv_heads=num_kv_heads,
            groups=groups,
            head_size=head_size,
            block_size=block_size,
            dtype=kv_cache.dtype.name,
        )
    check_supported(kv_cache, head_size, knobs, sizes, chip)
    parts = RowParts.of(kv_cache, head_size)
    packs = parts.product_dtype == jnp.bfloat16
    plan = Plan.of(knobs, groups=groups, block_size=block_size, packs=packs, causal=options.causal)
    tile, pack, rows = plan.tile, plan.pack, plan.tile * groups
    word_dtype = jnp.bfloat16 if pack == 2 else jnp.float32
    scaled = (q.astype(jnp.float32) * query_factor(options)).astype(word_dtype)
    words = query_words(scaled, parts.key_width, pack)
    scalars, row_of_token = tile_list(context_lens, query_start, num_tokens, plan, options)
    num_tiles = scalars.shape[1]
    row_sinks = jnp.full((num_kv_heads, groups // pack, pack), -jnp.inf, jnp.float32)
    if sinks is not None:
        row_sinks = sinks.astype(jnp.float32).reshape(row_sinks.shape)
    row_sinks = jnp.broadcast_to(
        row_sinks[:, :, None, :], (num_kv_heads, groups // pack, tile, pack)
    ).reshape(num_kv_heads, 1, rows)

    def table_of(later: int) -> pl.BlockSpec:
        def index(i: Any, scalars_ref: Any) -> tuple[Any, int, int]:
            return scalars_ref[0, jnp.minimum(i + later, num_tiles - 1)], 0, 0

        return pl.BlockSpec((None, 1, tables.shape[1]), index, memory_space=pltpu.SMEM)

    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, options=options, parts=parts, plan=plan, num_tiles=num_tiles, profile=profile
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles,),
            in_specs=[
                table_of(0),
                table_of(1),
                pl.BlockSpec((num_kv_heads, 1, rows), lambda i, _: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((None, num_kv_heads, 1, rows), lambda i, _: (i, 0, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, tile, *words.shape[1:]), word_dtype),
                pltpu.VMEM((tile, *words.shape[1:]), word_dtype),
                pltpu.VMEM((num_kv_heads, rows, parts.key_width), parts.product_dtype),
                pltpu.VMEM((2, num_kv_heads, plan.chunk, width), kv_cache.dtype),
                pltpu.VMEM((num_kv_heads, 1, rows), jnp.float32),
                pltpu.VMEM((num_kv_heads, SUM_ROWS + head_size, rows), jnp.float32),
                pltpu.VMEM((2, plan.chunk, plan.lanes), jnp.float32),
                pltpu.VMEM((2, plan.chunk, plan.lanes), parts.product_dtype),
                pltpu.VMEM((plan.patterns, plan.chunk, plan.lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2, plan.pages)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(words.shape, word_dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit(chip),
            # The ids are safe already. (On a 7x the static profiler follows copies by their
            # checks.)
            disable_bounds_checks=profile is None or chip.arch < (7, 0),
        ),
        interpret=interpret_argument(),
        name="paged_tiles",
    )(scalars, tables[:, None, :], tables[:, None, :], row_sinks, words, kv_cache)
    lse = lse.reshape(num_tiles, num_kv_heads, groups // pack, tile, pack)
    lse = lse.transpose(0, 3, 1, 2, 4).reshape(num_tiles * tile, num_heads)
    out = outputs_of_words(out, parts.key_width, num_heads, head_size)
    return out.astype(q.dtype), lse[row_of_token]


def _minimum(a: Any, b: int) -> Any:
    return min(a, b) if isinstance(a, int) else jnp.minimum(a, b)


def _kernel(
    scalars_ref,  # int32[6, NT]: see `tile_list`
    table_ref,  # SMEM int32[1, M]
    next_table_ref,  # SMEM int32[1, M], of the next tile
    sinks_ref,  # float32[K, 1, R]
    q_ref,  # HBM [T, W/128 x N, 128]
    kv_ref,  # HBM [P, K, B, ROW]
    out_ref,  # HBM [T, W/128 x N, 128]
    lse_ref,  # float32[K, 1, R]
    q_buffer_ref,  # [2, tile, W/128 x N, 128]
    out_buffer_ref,  # [tile, W/128 x N, 128]
    rows_ref,  # [K, R, W]: queries of a KV head, R = G/pack x tile x pack
    buffer_ref,  # [2, K, C, ROW]
    peak_ref,  # these five: see `Softmax`
    acc_ref,
    logits_ref,
    weights_ref,
    mask_ref,
    kv_semaphores,  # DMA[2, pages]
    q_semaphores,  # DMA[2]
    out_semaphore,  # DMA
    parity_ref,  # SMEM int32[1]: which half of the buffer the next chunk is in
    *,
    options: AttentionOptions,
    parts: RowParts,
    plan: Plan,
    num_tiles: int,
    profile: int | None,
):
    i = pl.program_id(0)
    pages, chunk = plan.pages, plan.chunk
    count, seen, first, blocks = (scalars_ref[row, i] for row in range(2, 6))
    following = jnp.minimum(i + 1, num_tiles - 1)
    has_following = (i + 1 < num_tiles) & (scalars_ref[2, following] > 0)
    first_number = jnp.minimum(blocks, pages)
    next_number = jnp.minimum(scalars_ref[5, following], pages)
    num_chunks = pl.cdiv(blocks, pages)
    is_used = scalars_ref[2, i] > 0
    if profile is not None:
        is_used = has_following = True
        count, first_number, next_number = plan.tile, pages, pages

    copies = BlockCopies(kv_ref, buffer_ref, kv_semaphores, plan)
    softmax = Softmax(peak_ref, acc_ref, logits_ref, weights_ref, mask_ref, options, parts, plan)

    def tokens_of(tile_index: Any) -> tuple[Any, Any]:
        """First token of a tile, and number of them."""
        number = scalars_ref[2, tile_index] if profile is None else plan.tile
        return scalars_ref[1, tile_index], number

    def queries(half: Any) -> RowCopies:
        return RowCopies(q_ref, q_buffer_ref.at[half], q_semaphores.at[half], inwards=True)

    outputs = RowCopies(out_ref, out_buffer_ref, out_semaphore, inwards=False)

    def fetch_following() -> None:
        @when(has_following)
        def _() -> None:
            copies.start(next_table_ref, scalars_ref[4, following], parity_ref[0], next_number)

    def one_chunk(c: Any, number: Any, rest: Any, is_full: Any) -> None:
        """Attend to chunk c of `number` blocks; `rest` blocks come after it."""
        half = parity_ref[0]
        parity_ref[0] = 1 - half
        column = first + c * pages

        @when(rest > 0)
        def _() -> None:
            copies.start(table_ref, column + pages, 1 - half, _minimum(rest, pages))

        @when(rest <= 0)
        def _() -> None:
            fetch_following()

        copies.wait(table_ref, half, number)

        # Masked or not, there is one copy of the code: with a second one the compiler schedules
        # both so much worse that a mask of zeros is cheap.
        @when(not is_full if is_full is True else ~is_full)
        def _() -> None:
            softmax.mask(column * plan.block_size, seen)

        softmax.attend(rows_ref, buffer_ref.at[half], zero=jnp.minimum(i, 0))

        @when(not is_full if is_full is True else ~is_full)
        def _() -> None:
            softmax.unmask()

    def all_chunks() -> None:
        if profile is not None:
            # The last one stands for the first of the next tile.
            softmax.mask(0, seen)
            jax.lax.fori_loop(0, profile, lambda c, _: one_chunk(c, pages, pages, True), None)
            softmax.unmask()
            return

        def body(c: Any, carry: None) -> None:
            rest = blocks - (c + 1) * pages
            position = (first + c * pages) * plan.block_size
            is_full = position + chunk - 1 <= seen
            if options.sliding_window is not None:
                is_full &= position > seen + count - 1 - options.sliding_window
            one_chunk(c, jnp.minimum(rest + pages, pages), rest, is_full)

        jax.lax.fori_loop(0, num_chunks, body, None)

        @when(num_chunks <= 0)
        def _() -> None:
            fetch_following()

    @when((i == 0) & is_used)
    def _() -> None:
        parity_ref[0] = 0
        softmax.unmask()
        queries(0).start(*tokens_of(i))
        copies.start(table_ref, first, 0, first_number)

    @when(is_used)
    def _() -> None:
        half = i % 2

        @when(has_following)
        def _() -> None:
            queries(1 - half).start(*tokens_of(following))

        queries(half).wait(*tokens_of(i))
        for k in range(rows_ref.shape[0]):
            unpack_rows(q_buffer_ref.at[half], rows_ref, k, plan)
            softmax.begin(k, sinks_ref[k])
        all_chunks()

        @when(i > 0)
        def _() -> None:
            outputs.wait(*tokens_of(i - 1))

        for k in range(rows_ref.shape[0]):
            out, lse_ref[k] = softmax.finish(k)
            pack_rows(out, k, out_buffer_ref, rows_ref.shape, plan)
        outputs.start(*tokens_of(i))

        @when(not has_following if has_following is True else ~has_following)
        def _() -> None:
            outputs.wait(*tokens_of(i))
