"""Prefill and mixed batches on TPU: tiles of queries against chunks of keys."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...chips import current_chip, interpret_argument
from ...layout import LANES
from ...tuning import tuned
from ..arguments import AttentionOptions
from .knobs import Sizes, TilesKnobs, default_tiles_knobs, vmem_limit
from .rows import RowParts, check_supported

_SUBLANES = 8
_DEPTH = 256
_LOG2_E = math.log2(math.e)
# Finite, so that a row that has seen no key yet has differences that are numbers.
_NO_PEAK = -1e30


class _Plan(NamedTuple):
    """Static sizes of one call.

    pack: heads of one 32-bit word of a packed query row.
    simulated: see `_is_simulated`.
    """

    tile: int
    pack: int
    block_size: int
    pages: int
    sub_pages: int
    lanes: int
    causal: bool
    simulated: bool


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
    profile: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of sequences with several queries: see `octavo.pallas_kernels.paged_attention`.

    A grid step per tile of queries walks the keys that the tile sees in chunks, copied as in
    `decode`. Scores have keys on sublanes and queries (times the G heads that share a KV head)
    on lanes: the softmax then reduces over sublanes, which the vector unit does without
    shuffles, and the weights are an operand of the second product as they are. A chunk that all
    queries see wholly runs without a mask; at the diagonal, at the edges of a window and at the
    end of the context, smaller masked steps skip what nobody sees.

    Queries stay packed: their 32-bit words are read and written with a stride, which separates
    KV heads at no cost. Only the rows of a tile's own tokens are written.

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
        profile: (whole chunks, masked steps) that every tile is taken to have, so that a static
            profiler sees loops of known length. Never for results.

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
    pack = 2 if parts.product_dtype == jnp.bfloat16 and groups % 2 == 0 else 1
    pages = max(1, knobs.chunk_tokens // block_size)
    sub_pages = max(1, min(pages, knobs.masked_tokens // block_size))
    pages = pages // sub_pages * sub_pages
    tile = knobs.tile_queries
    rows = tile * groups
    plan = _Plan(
        tile=tile,
        pack=pack,
        block_size=block_size,
        pages=pages,
        sub_pages=sub_pages,
        lanes=_lanes(tile, groups, knobs.lanes),
        causal=options.causal,
        simulated=_is_simulated(),
    )
    word_dtype = jnp.bfloat16 if pack == 2 else jnp.float32
    words = _words(q.astype(word_dtype), parts.key_width, pack)
    scalars, row_of_token = _tile_list(
        context_lens, query_start, num_tokens, tile, block_size, options
    )
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

    chunk = pages * block_size
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
                pltpu.VMEM((2, num_kv_heads, chunk, width), kv_cache.dtype),
                pltpu.VMEM((num_kv_heads, 1, rows), jnp.float32),
                pltpu.VMEM((num_kv_heads, 1, rows), jnp.float32),
                pltpu.VMEM((num_kv_heads, head_size, rows), jnp.float32),
                pltpu.VMEM((2, chunk, plan.lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2, pages)),
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
            # As in `decode`.
            disable_bounds_checks=profile is None,
        ),
        interpret=interpret_argument(),
        name="paged_tiles",
    )(scalars, tables[:, None, :], tables[:, None, :], row_sinks, words, kv_cache)
    lse = lse.reshape(num_tiles, num_kv_heads, groups // pack, tile, pack)
    lse = lse.transpose(0, 3, 1, 2, 4).reshape(num_tiles * tile, num_heads)
    out = out.reshape(num_tokens, parts.key_width // LANES, -1, LANES).swapaxes(1, 2)
    out = out.reshape(num_tokens, -1, parts.key_width)[:, :num_heads, :head_size]
    return out.astype(q.dtype), lse[row_of_token]


def _words(q: jax.Array, width: int, pack: int) -> jax.Array:
    """Queries as rows of 128 lanes `[T, W/128 x N, 128]`, N rounded up to whole vectors.

    The kernel reads every N/pack-th 32-bit row, which wants a last axis of 128.
    """
    num_tokens, num_heads, head_size = q.shape
    padding = -num_heads % (_SUBLANES * pack)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, width - head_size)))
    q = q.reshape(num_tokens, -1, width // LANES, LANES).swapaxes(1, 2)
    return q.reshape(num_tokens, -1, LANES)


def _is_simulated() -> bool:
    """Whether an interpreter runs this that has no views of references."""
    interpret = interpret_argument()
    if jax.__version_info__ < (0, 11):
        return interpret is not False
    return isinstance(interpret, pltpu.InterpretParams)


def _lanes(tile: int, groups: int, most: int) -> int:
    """The largest part of `tile * groups` rows that divides them and is not above `most`."""
    if tile >= most:
        return most
    return tile * max(d for d in range(1, groups + 1) if groups % d == 0 and tile * d <= most)


def _tile_list(
    context_lens: jax.Array,
    query_start: jax.Array,
    num_tokens: int,
    tile: int,
    block_size: int,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """The tiles as `int32[6, NT]` (see `_kernel`), and the row of the tiles of each token."""
    num_seqs = context_lens.shape[0]
    query_lens = jnp.diff(query_start)
    per_seq = jnp.where(query_lens > 1, -(-query_lens // tile), 0)
    end = jnp.cumsum(per_seq)
    owners = min(num_seqs, max(num_tokens // 2, 1))
    bound = min(
        (num_tokens + owners * (tile - 1)) // tile, owners * -(-options.max_query_len // tile)
    )
    index = jnp.arange(max(bound, 1), dtype=jnp.int32)
    seq = jnp.searchsorted(end, index, side="right").astype(jnp.int32)
    used = seq < num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    offset = (index - (end - per_seq)[seq]) * tile
    count = jnp.where(used, jnp.minimum(tile, query_lens[seq] - offset), 0)
    seen = options.query_position(context_lens[seq], query_lens[seq], offset)
    last = seen + count if options.causal else seen + 1
    first = jnp.zeros_like(seen)
    if options.sliding_window is not None:
        first = jnp.maximum(seen - options.sliding_window + 1, 0) // block_size
    blocks = jnp.where(used, -(-last // block_size) - first, 0)
    scalars = jnp.stack([seq, query_start[seq] + offset, count, seen, first, blocks])

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, num_seqs - 1)
    row = (end - per_seq)[owner] * tile + token - query_start[owner]
    return scalars.astype(jnp.int32), jnp.clip(row, 0, index.shape[0] * tile - 1)


def _when(condition: Any) -> Any:
    """`pl.when`, decided at once if the condition is a Python bool."""
    if isinstance(condition, bool):
        return lambda fn: fn() if condition else None
    return pl.when(condition)


def _minimum(a: Any, b: int) -> Any:
    return min(a, b) if isinstance(a, int) else jnp.minimum(a, b)


def _kernel(
    scalars_ref,  # int32[6, NT]: sequence, token, count, last key of query 0, first block, blocks
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
    peak_ref,  # float32[K, 1, R]
    total_ref,  # float32[K, 1, R]
    acc_ref,  # float32[K, H, R]
    logits_ref,  # float32[2, C, lanes]
    kv_semaphores,  # DMA[2, pages]
    q_semaphores,  # DMA[2]
    out_semaphore,  # DMA
    parity_ref,  # SMEM int32[1]: which half of the buffer the next chunk is in
    *,
    options: AttentionOptions,
    parts: RowParts,
    plan: _Plan,
    num_tiles: int,
    profile: tuple[int, int] | None,
):
    i = pl.program_id(0)
    tile, pack, block_size, pages, sub_pages, lanes, causal, _ = plan
    num_kv_heads, head_size, num_rows = acc_ref.shape
    chunk = pages * block_size
    sub_chunk = sub_pages * block_size
    count, seen, first, blocks = (scalars_ref[row, i] for row in range(2, 6))
    following = jnp.minimum(i + 1, num_tiles - 1)
    has_following = (i + 1 < num_tiles) & (scalars_ref[2, following] > 0)
    first_number = jnp.minimum(blocks, pages)
    next_number = jnp.minimum(scalars_ref[5, following], pages)
    num_chunks = pl.cdiv(blocks, pages)
    is_used = scalars_ref[2, i] > 0
    if profile is not None:
        is_used = has_following = True
        count, first_number, next_number = tile, pages, pages

    # Copies.

    def copy_block(ids_ref: Any, column: Any, half: Any, page: Any) -> Any:
        slots = pl.ds(pl.multiple_of(page * block_size, block_size), block_size)
        return pltpu.make_async_copy(
            kv_ref.at[ids_ref[0, column + page]],
            buffer_ref.at[half, :, slots],
            kv_semaphores.at[half, page],
        )

    def fetch(ids_ref: Any, column: Any, half: Any, number: Any) -> None:
        """Start copying `number` blocks, from a column of a table into half of the buffer."""

        def one(page: Any, carry: None) -> None:
            copy_block(ids_ref, column, half, page).start()

        # 0 x NaN is NaN: what a masked step reads past the copied blocks must be finite.
        @_when(number % sub_pages > 0)
        def _() -> None:
            slots = pl.ds(pl.multiple_of(number // sub_pages * sub_chunk, sub_chunk), sub_chunk)
            shape = (num_kv_heads, sub_chunk, buffer_ref.shape[3])
            buffer_ref[half, :, slots] = jnp.zeros(shape, buffer_ref.dtype)

        @_when(number < pages)
        def _() -> None:
            jax.lax.fori_loop(0, number, one, None)

        @_when(number == pages)
        def _() -> None:
            for page in range(pages):
                one(page, None)

    def wait_blocks(half: Any, number: Any) -> None:
        @_when(number == pages)
        def _() -> None:
            for page in range(pages):
                copy_block(table_ref, 0, half, page).wait()

        @_when(number < pages)
        def _() -> None:
            def one(page: Any, carry: None) -> None:
                copy_block(table_ref, 0, half, page).wait()

            jax.lax.fori_loop(0, number, one, None)

    def by_size(number: Any, do: Any) -> None:
        """`do(offset, size)` for static sizes that make up `number` rows."""
        for bit in range(min(tile, q_ref.shape[0]).bit_length()):

            @_when((number >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:
                do((number >> (bit + 1)) << (bit + 1), 1 << bit)

    def count_of(tile_index: Any) -> Any:
        return scalars_ref[2, tile_index] if profile is None else tile

    def copy_q(tile_index: Any, half: Any, start: bool) -> None:
        def do(offset: Any, size: int) -> None:
            source = scalars_ref[1, tile_index] + offset
            copy = pltpu.make_async_copy(
                q_ref.at[pl.ds(source, size)],
                q_buffer_ref.at[half, pl.ds(offset, size)],
                q_semaphores.at[half],
            )
            copy.start() if start else copy.wait()

        by_size(count_of(tile_index), do)

    def copy_out(tile_index: Any, start: bool) -> None:
        def do(offset: Any, size: int) -> None:
            target = scalars_ref[1, tile_index] + offset
            copy = pltpu.make_async_copy(
                out_buffer_ref.at[pl.ds(offset, size)],
                out_ref.at[pl.ds(target, size)],
                out_semaphore,
            )
            copy.start() if start else copy.wait()

        by_size(count_of(tile_index), do)

    def fetch_following() -> None:
        @_when(has_following)
        def _() -> None:
            fetch(next_table_ref, scalars_ref[4, following], parity_ref[0], next_number)

    # Rows: word j of a KV head holds `pack` heads of a token.

    words_per_token = out_buffer_ref.shape[1] // pack
    num_parts = rows_ref.shape[2] // LANES
    per_head = num_rows // (tile * pack)

    def places(k: int) -> Any:
        """First words of a KV head, each with its rows and lanes in `rows_ref[k]`."""
        for part in range(num_parts):
            for j in range(per_head):
                word = part * (words_per_token // num_parts) + k * per_head + j
                rows = slice(j * tile * pack, (j + 1) * tile * pack)
                yield word, rows, slice(part * LANES, (part + 1) * LANES)

    def words(ref: Any, first_word: int) -> Any:
        """One word of each token of `[tile, X, 128]`, as 32-bit `[tile, 128]`."""
        ref = ref.bitcast(jnp.int32) if pack == 2 else ref
        flat = ref.reshape(tile * words_per_token, LANES)
        return flat.at[pl.ds(first_word, tile, stride=words_per_token), :]

    def heads(word: int) -> Any:
        return pl.ds(word * pack, pack)

    def unpack_rows(half: Any) -> None:
        for k in range(num_kv_heads):
            for word, rows, lane in places(k):
                if plan.simulated:
                    row = q_buffer_ref[half, :, heads(word), :].reshape(tile * pack, LANES)
                else:
                    row = words(q_buffer_ref.at[half], word)[...]
                    row = pltpu.bitcast(row, jnp.bfloat16) if pack == 2 else row
                rows_ref[k, rows, lane] = row.astype(rows_ref.dtype)

    def pack_rows() -> None:
        for k in range(num_kv_heads):
            total = total_ref[k]
            out = acc_ref[k] / jnp.where(total == 0, 1.0, total)
            out = jnp.pad(out, ((0, rows_ref.shape[2] - head_size), (0, 0))).T
            lse_ref[k] = (peak_ref[k] + jnp.log2(total)) / _LOG2_E
            for word, rows, lane in places(k):
                row = out[rows, lane].astype(out_buffer_ref.dtype)
                if plan.simulated:
                    out_buffer_ref[:, heads(word), :] = row.reshape(tile, pack, LANES)
                else:
                    row = pltpu.bitcast(row, jnp.int32) if pack == 2 else row
                    words(out_buffer_ref, word)[...] = row

    # Softmax, with the keys of a chunk on the sublanes and the queries on the lanes.

    def attend(half: Any, offset: Any, size: int, position: Any, masked: bool) -> None:
        """Fold in `size` slots from `offset` on, the first of them at `position`."""
        slots = pl.ds(offset, size)

        units = [(k, lane) for k in range(num_kv_heads) for lane in range(0, num_rows, lanes)]

        def scores(unit: int) -> jax.Array:
            """Store the logits of a unit, in powers of two; return their peak."""
            k, lane = units[unit]
            logits = jax.lax.dot_general(
                parts.key(buffer_ref[half, k, slots, : parts.key_width]),
                rows_ref[k, lane : lane + lanes, :],
                (((1,), (1,)), ((), ())),
                precision=parts.precision,
                preferred_element_type=jnp.float32,
            )
            if options.soft_cap is None:
                logits = logits * (options.scale * _LOG2_E)
            else:
                logits = options.logits(logits) * _LOG2_E
            if masked:
                key = position + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
                row = lane + jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
                limit = seen + (row % (tile * pack) // pack if causal else 0 * row)
                logits = jnp.where(options.visible(key, limit), logits, -jnp.inf)
            logits_ref[unit % 2, :size] = logits
            return jnp.max(logits, axis=0, keepdims=True)

        def fold(unit: int, new_peak: jax.Array) -> None:
            k, lane = units[unit]
            at = slice(lane, lane + lanes)
            old = peak_ref[k, :, at]
            peak = jnp.maximum(old, new_peak)
            shrink = jnp.exp2(old - peak)
            total = total_ref[k, :, at] * shrink
            acc = acc_ref[k, :, at] * shrink
            # In steps of the matrix unit's depth, so that weights go from registers into it.
            for begin in range(0, size, _DEPTH):
                keys = slice(begin, min(begin + _DEPTH, size))
                weights = jnp.exp2(logits_ref[unit % 2, keys] - peak)
                total += jnp.sum(weights, axis=0, keepdims=True)
                acc += jax.lax.dot_general(
                    value_of(k)[:, keys],
                    weights.astype(parts.product_dtype),
                    (((1,), (0,)), ((), ())),
                    precision=parts.precision,
                    preferred_element_type=jnp.float32,
                )
            peak_ref[k, :, at] = peak
            total_ref[k, :, at] = total
            acc_ref[k, :, at] = acc

        values: dict[int, jax.Array] = {}

        def value_of(k: int) -> jax.Array:
            if k not in values:
                values.clear()
                begin = head_size - parts.value_begin
                value = parts.value(buffer_ref[half, k, slots, :]).T
                values[k] = value[begin : begin + head_size]
            return values[k]

        new_peak = scores(0)
        for unit in range(len(units)):
            later = scores(unit + 1) if unit + 1 < len(units) else new_peak
            fold(unit, new_peak)
            new_peak = later

    def one_chunk(c: Any, number: Any, rest: Any, is_full: Any) -> None:
        """Attend to chunk c of `number` blocks; `rest` blocks come after it."""
        half = parity_ref[0]
        parity_ref[0] = 1 - half
        column = first + c * pages

        @_when(rest > 0)
        def _() -> None:
            fetch(table_ref, column + pages, 1 - half, _minimum(rest, pages))

        @_when(rest <= 0)
        def _() -> None:
            fetch_following()

        wait_blocks(half, number)
        position = column * block_size

        @_when(is_full)
        def _() -> None:
            attend(half, 0, chunk, position, masked=False)

        @_when(jnp.logical_not(is_full) if isinstance(is_full, jax.Array) else not is_full)
        def _() -> None:
            def step(j: Any, carry: None) -> None:
                offset = pl.multiple_of(j * sub_chunk, sub_chunk)
                attend(half, offset, sub_chunk, position + offset, masked=True)

            jax.lax.fori_loop(0, pl.cdiv(number, sub_pages), step, None)

    def all_chunks() -> None:
        if profile is not None:
            full, steps = profile
            jax.lax.fori_loop(0, full, lambda c, _: one_chunk(c, pages, pages, True), None)
            if steps:
                one_chunk(full, steps * sub_pages, 0, False)
            return

        def body(c: Any, carry: None) -> None:
            rest = blocks - (c + 1) * pages
            position = (first + c * pages) * block_size
            is_full = position + chunk - 1 <= seen
            if options.sliding_window is not None:
                is_full &= position > seen + count - 1 - options.sliding_window
            one_chunk(c, jnp.minimum(rest + pages, pages), rest, is_full)

        jax.lax.fori_loop(0, num_chunks, body, None)

        @_when(num_chunks <= 0)
        def _() -> None:
            fetch_following()

    @_when((i == 0) & is_used)
    def _() -> None:
        parity_ref[0] = 0
        copy_q(i, 0, start=True)
        fetch(table_ref, first, 0, first_number)

    @_when(is_used)
    def _() -> None:
        half = i % 2

        @_when(has_following)
        def _() -> None:
            copy_q(following, 1 - half, start=True)

        copy_q(i, half, start=False)
        unpack_rows(half)
        sink = sinks_ref[...]
        peak_ref[...] = jnp.where(sink == -jnp.inf, _NO_PEAK, sink * _LOG2_E)
        total_ref[...] = jnp.where(sink == -jnp.inf, 0.0, 1.0)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
        all_chunks()

        @_when(i > 0)
        def _() -> None:
            copy_out(i - 1, start=False)

        pack_rows()
        copy_out(i, start=True)

        @_when(not has_following if has_following is True else ~has_following)
        def _() -> None:
            copy_out(i, start=False)
