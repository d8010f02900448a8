"""Decode on TPU: one query per sequence, all KV heads of a block in one copy."""

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
from .knobs import DecodeKnobs, Sizes, default_decode_knobs, vmem_limit
from .rows import RowParts, check_supported

_SUBLANES = 8


def decode(
    q: jax.Array,
    kv_cache: jax.Array,
    tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    knobs: DecodeKnobs | None = None,
    profile_len: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per sequence: see `octavo.pallas_kernels.paged_attention`.

    A grid step per sequence walks its context in chunks of blocks. Two halves of a buffer take
    turns: while one chunk is attended to, the next is copied, and during a sequence's last
    chunk that is the first one of the next sequence. Products and softmax run over all KV heads
    at once, which hides the latency of the matrix unit.

    A sequence's result depends on the knobs and on nothing else of the batch, bit for bit.

    Args:
        q: `[S, N, H]`.
        kv_cache: `[P, K, B, ROW]`.
        tables: `int32[S, M]`, every id in `[0, P)`.
        context_lens: `int32[S]`; 0 gives zeros and an lse of -inf (or the sink).
        sinks: `float32[N]` or None.
        options: see `AttentionOptions`.
        knobs: None means the measured ones, or the heuristic's.
        profile_len: a context length, a multiple of the chunk, that every sequence is taken to
            have, so that a static profiler sees loops of known length. Never for results.

    Returns:
        `(out [S, N, H] in q's dtype, lse float32[S, N])`.

    Raises:
        NotImplementedError: the cache has a dtype, a shape or blocks that do not fit the chip.
    """
    num_seqs, num_heads, head_size = q.shape
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
            "mosaic_tpu.decode",
            chip,
            default_decode_knobs(sizes, chip),
            num_kv_heads=num_kv_heads,
            groups=groups,
            head_size=head_size,
            block_size=block_size,
            dtype=kv_cache.dtype.name,
        )
    check_supported(kv_cache, head_size, knobs, sizes, chip)
    parts = RowParts.of(kv_cache, head_size)
    pages = max(1, knobs.chunk_tokens // block_size)
    sub_pages = max(1, min(pages, knobs.tail_tokens // block_size))
    pages = pages // sub_pages * sub_pages
    chunk = pages * block_size

    rows = -(-groups // _SUBLANES) * _SUBLANES
    grouped = q.reshape(num_seqs, num_kv_heads, groups, head_size).astype(parts.product_dtype)
    grouped = jnp.pad(
        grouped, ((0, 0), (0, 0), (0, rows - groups), (0, parts.key_width - head_size))
    )
    first = jnp.zeros_like(context_lens)
    if options.sliding_window is not None:
        first = jnp.maximum(context_lens - options.sliding_window, 0) // block_size
    blocks = -(-context_lens // block_size) - first
    following = _following(context_lens > 0)
    scalars = jnp.stack([context_lens, first, blocks, following])
    row_sinks = jnp.full((num_kv_heads, rows), -jnp.inf, jnp.float32)
    if sinks is not None:
        row_sinks = row_sinks.at[:, :groups].set(
            sinks.astype(jnp.float32).reshape(num_kv_heads, groups)
        )

    def of_sequence(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *block), lambda s, _: (s, *(0 for _ in block)))

    def table_of(next_one: bool) -> pl.BlockSpec:
        def index(s: Any, scalars_ref: Any) -> tuple[Any, int, int]:
            row = jnp.minimum(scalars_ref[3, s], num_seqs - 1) if next_one else s
            return row, 0, 0

        return pl.BlockSpec((None, 1, tables.shape[1]), index, memory_space=pltpu.SMEM)

    kernel = functools.partial(
        _kernel,
        options=options,
        parts=parts,
        num_seqs=num_seqs,
        block_size=block_size,
        pages=pages,
        sub_pages=sub_pages,
        profile_len=profile_len,
    )
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_seqs,),
            in_specs=[
                table_of(False),
                table_of(True),
                of_sequence(num_kv_heads, rows, parts.key_width),
                pl.BlockSpec((num_kv_heads, rows, 1), lambda s, _: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                of_sequence(num_kv_heads, rows, parts.value_width),
                of_sequence(num_kv_heads, rows, 1),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, num_kv_heads, chunk, width), kv_cache.dtype),
                pltpu.SemaphoreType.DMA((2, pages)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_seqs, num_kv_heads, rows, parts.value_width), q.dtype),
            jax.ShapeDtypeStruct((num_seqs, num_kv_heads, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit(chip),
            # The ids are safe already. (The static profiler follows copies by their checks.)
            disable_bounds_checks=profile_len is None,
        ),
        interpret=interpret_argument(),
        name="paged_decode",
    )(scalars, tables[:, None, :], tables[:, None, :], grouped, row_sinks[..., None], kv_cache)
    begin = head_size - parts.value_begin
    out = out[:, :, :groups, begin : begin + head_size].reshape(q.shape)
    return out, lse[:, :, :groups, 0].reshape(num_seqs, num_heads)


def _following(used: jax.Array) -> jax.Array:
    """`int32[S]`: the next sequence that has a context, or S."""
    index = jnp.where(used, jnp.arange(used.shape[0], dtype=jnp.int32), used.shape[0])
    later = jax.lax.cummin(index, reverse=True)
    return jnp.concatenate([later[1:], jnp.full((1,), used.shape[0], jnp.int32)])


def _kernel(
    scalars_ref,  # int32[4, S]: context length, first block, blocks, following sequence
    table_ref,  # SMEM int32[1, M]
    next_table_ref,  # SMEM int32[1, M], of the following sequence
    q_ref,  # [K, R, key_width], R >= G rows
    sinks_ref,  # float32[K, R, 1]
    kv_ref,  # HBM [P, K, B, ROW]
    out_ref,  # [K, R, value_width]
    lse_ref,  # float32[K, R, 1]
    buffer_ref,  # [2, K, C, ROW]
    semaphores,  # DMA[2, pages]
    parity_ref,  # SMEM int32[1]: which half of the buffer the next chunk is in
    *,
    options: AttentionOptions,
    parts: RowParts,
    num_seqs: int,
    block_size: int,
    pages: int,
    sub_pages: int,
    profile_len: int | None,
):
    s = pl.program_id(0)
    chunk = pages * block_size
    context_len, first, blocks, following = (scalars_ref[i, s] for i in range(4))
    whole = (context_len - first * block_size) // chunk
    if profile_len is not None:
        blocks, whole = profile_len // block_size, profile_len // chunk
    rest = blocks - whole * pages
    num_chunks = (blocks + pages - 1) // pages

    def copy(ids_ref: Any, column: Any, half: Any, page: Any) -> Any:
        slots = pl.ds(pl.multiple_of(page * block_size, block_size), block_size)
        return pltpu.make_async_copy(
            kv_ref.at[ids_ref[0, column + page]],
            buffer_ref.at[half, :, slots],
            semaphores.at[half, page],
        )

    def fetch(ids_ref: Any, column: Any, half: Any, count: Any) -> None:
        """Start copying `count` blocks, from a column of a table into half of the buffer."""

        def one(page: Any, carry: None) -> None:
            copy(ids_ref, column, half, page).start()

        if profile_len is None:
            # 0 x NaN is NaN: what the tail's last step reads past the copied blocks must be finite.
            @pl.when(count % sub_pages > 0)
            def _() -> None:
                size = sub_pages * block_size
                rows = pl.ds(pl.multiple_of(count // sub_pages * size, size), size)
                shape = (buffer_ref.shape[1], size, buffer_ref.shape[3])
                buffer_ref[half, :, rows] = jnp.zeros(shape, buffer_ref.dtype)

            @pl.when(count < pages)
            def _() -> None:
                jax.lax.fori_loop(0, count, one, None)

        @pl.when(count == pages)
        def _() -> None:
            for page in range(pages):
                one(page, None)

    def fetch_following() -> None:
        @pl.when(following < num_seqs)
        def _() -> None:
            row = jnp.minimum(following, num_seqs - 1)
            count = jnp.minimum(scalars_ref[2, row], pages)
            fetch(next_table_ref, scalars_ref[1, row], parity_ref[0], count)

    def attend(softmax: Any, kv: jax.Array, position: Any, masked: bool) -> Any:
        """Fold in the slots `kv: [K, C, ROW]`, the first of them at `position`."""
        peak, total, acc = softmax
        scores = jax.lax.dot_general(
            q_ref[...],
            parts.key(kv),
            (((2,), (2,)), ((0,), (0,))),
            precision=parts.precision,
            preferred_element_type=jnp.float32,
        )
        logits = options.logits(scores)
        if masked or options.sliding_window is not None:
            key_position = position + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
            seen = options.visible(key_position, context_len - 1)
            logits = jnp.where(seen, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_peak)
        shrink = jnp.exp(peak - new_peak)
        value = jax.lax.dot_general(
            weights.astype(parts.product_dtype),
            parts.value(kv),
            (((2,), (1,)), ((0,), (0,))),
            precision=parts.precision,
            preferred_element_type=jnp.float32,
        )
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return new_peak, total, acc * shrink + value

    @pl.when(s == 0)
    def _() -> None:
        parity_ref[0] = 0

        @pl.when(blocks > 0)
        def _() -> None:
            fetch(table_ref, first, 0, jnp.minimum(blocks, pages))

        @pl.when(blocks == 0)
        def _() -> None:
            fetch_following()

    peak = sinks_ref[...]
    softmax = (peak, jnp.where(peak == -jnp.inf, 0.0, 1.0), jnp.zeros(out_ref.shape, jnp.float32))

    def fetch_next(i: Any) -> Any:
        """Start the copy of what comes after chunk i; return where chunk i is."""
        half = parity_ref[0]
        parity_ref[0] = 1 - half

        @pl.when(i + 1 < num_chunks)
        def _() -> None:
            column = (i + 1) * pages
            fetch(table_ref, first + column, 1 - half, jnp.minimum(blocks - column, pages))

        @pl.when(i + 1 == num_chunks)
        def _() -> None:
            fetch_following()

        return half

    def whole_chunk(i: Any, softmax: Any) -> Any:
        half = fetch_next(i)
        for page in range(pages):
            copy(table_ref, 0, half, page).wait()
        position = first * block_size + i * chunk
        return attend(softmax, buffer_ref[half], position, masked=False)

    softmax = jax.lax.fori_loop(0, whole, whole_chunk, softmax)

    def last_chunk(softmax: Any) -> Any:
        half = fetch_next(whole)

        def wait(page: Any, carry: None) -> None:
            copy(table_ref, 0, half, page).wait()

        jax.lax.fori_loop(0, rest, wait, None)
        steps = pl.cdiv(rest, sub_pages)

        size = sub_pages * block_size

        def step(j: Any, softmax: Any) -> Any:
            rows = pl.ds(pl.multiple_of(j * size, size), size)
            position = first * block_size + whole * chunk + j * size
            return attend(softmax, buffer_ref[half, :, rows], position, masked=True)

        return jax.lax.fori_loop(0, steps, step, softmax)

    if profile_len is None:
        softmax = jax.lax.cond(rest > 0, last_chunk, lambda softmax: softmax, softmax)
    peak, total, acc = softmax
    out_ref[...] = (acc / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
    lse_ref[...] = peak + jnp.log(total)
