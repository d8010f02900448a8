"""`write_kv` on TPU: each touched window of a block is read, merged with its new rows, and
written back.

A *window* is up to 16 rows of one block, all heads. Mosaic moves rows of packed dtypes only in
groups (2 of bfloat16, 4 of 8 bits: one 32-bit number per lane), and the tokens of a prefill chunk
share windows, so tokens are sorted by slot first and every window is visited once. New rows come as
32-bit numbers, one element each, which can be moved row by row, and are packed on the chip.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..chips import interpret_argument
from ..layout import LANES

_WINDOW_ROWS = 16
_MAX_TOKENS = 32768
# Half of the buffers wait for reads and half for writes.
_MAX_BUFFERS = 8
_BUFFER_BYTES = 6 << 20


class _Plan(NamedTuple):
    """Tokens by window, in SMEM.

    Attributes:
        count: `int32[1]` windows to visit, C.
        window: `int32[T]`, the first C of use: `slot // W` of the window.
        start: `int32[T+1]`: window i has the sorted tokens `start[i] .. start[i+1]-1`.
        opened: `int32[T]`: 1 if what the window holds does not count, its block being opened.
        gap: `int32[T]`: windows after this one that belong to an opened block and get no token.
        dense: `int32[T]`: 1 if a window's tokens fill it and follow each other in the call.
        order: `int32[T]`: sorted token -> token of the call.
        row: `int32[T]`: sorted token -> row of its window.
    """

    count: jax.Array
    window: jax.Array
    start: jax.Array
    opened: jax.Array
    gap: jax.Array
    dense: jax.Array
    order: jax.Array
    row: jax.Array


def write_kv_mosaic_tpu(
    kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    num_tokens = slots.shape[0]
    pack = 4 // kv_cache.dtype.itemsize
    rows = math.gcd(block_size, _WINDOW_ROWS)
    _check(num_tokens, rows, kv_cache.dtype, width)

    item_bytes = num_kv_heads * rows * width * (4 + kv_cache.dtype.itemsize)
    half = max(1, min(_MAX_BUFFERS, _BUFFER_BYTES // item_bytes) // 2)
    body = functools.partial(
        _kernel, heads=num_kv_heads, rows=rows, pack=pack, windows=block_size // rows, half=half
    )
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    plan = _plan(slots, num_blocks, block_size, rows)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        in_specs=[*[smem] * len(plan), anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            pltpu.VMEM((2 * half, num_kv_heads, rows, width), kv_cache.dtype),
            pltpu.VMEM((2 * half, rows * num_kv_heads * width // LANES, LANES), jnp.uint32),
            pltpu.VMEM((num_kv_heads, rows, width), kv_cache.dtype),
            pltpu.SemaphoreType.DMA((3, 2 * half)),
            pltpu.SemaphoreType.DMA(()),
        ],
        input_output_aliases={len(plan) + 1: 0},
        interpret=interpret_argument(),
        name="octavo_write_kv",
    )(*plan, _unpacked_rows(k, v, kv_cache, rows), kv_cache)


def _check(num_tokens: int, rows: int, dtype: jnp.dtype, width: int) -> None:
    if dtype == jnp.float16:
        raise NotImplementedError("Mosaic has no float16 on TPU")
    if width % LANES:
        raise NotImplementedError(f"rows of {width} elements are not a multiple of {LANES} on TPU")
    if rows % 4:
        raise NotImplementedError("a block size that is no multiple of 4 has no aligned rows on TPU")
    if num_tokens > _MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens are more than {_MAX_TOKENS} in one call")


def _unpacked_rows(k: jax.Array, v: jax.Array, kv_cache: jax.Array, rows: int) -> jax.Array:
    """New rows `uint32[T*K*C, 128]`, C = ROW/128: the bits of one element each.

    Mosaic loads with a stride from arrays of 128 lanes only. There are at least `rows` tokens, as
    a copy of a full window's, even one that never runs, must fit.
    """
    width = kv_cache.shape[-1]
    new = jnp.concatenate([k, v], axis=-1).astype(kv_cache.dtype)
    missing = max(0, rows - new.shape[0])
    new = jnp.pad(new, ((0, missing), (0, 0), (0, width - new.shape[-1]))).reshape(-1, LANES)
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[new.dtype.itemsize]
    return jax.lax.bitcast_convert_type(new, bits).astype(jnp.uint32)


def _plan(slots: jax.Array, num_blocks: int, block_size: int, rows: int) -> _Plan:
    num_tokens = slots.shape[0]
    windows = block_size // rows
    is_live = (slots >= block_size) & (slots < num_blocks * block_size)
    key = jnp.where(is_live, slots, num_blocks * block_size)
    order = jnp.argsort(key).astype(jnp.int32)
    slot = key[order]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    live = jnp.sum(is_live, dtype=jnp.int32)

    def differs(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])

    # What holds of the sorted tokens; then of the first token of each window.
    window = slot // rows
    first = differs(window) & (token < live)
    block_start = jax.lax.cummax(jnp.where(differs(slot // block_size), token, 0))
    opened = (slot[block_start] % block_size == 0).astype(jnp.int32)
    follows = ~differs(order - token) & ~differs(slot - token)
    run_start = jax.lax.cummax(jnp.where(follows, 0, token))

    start = jnp.nonzero(first, size=num_tokens + 1, fill_value=num_tokens)[0].astype(jnp.int32)
    start = jnp.minimum(start, live)
    begin, end = jnp.minimum(start[:-1], num_tokens - 1), start[1:]
    own = window[begin]
    last_of_block = (own // windows + 1) * windows
    following = jnp.where(end < live, window[jnp.minimum(end, num_tokens - 1)], last_of_block)
    gap = jnp.minimum(following, last_of_block) - own - 1
    dense = (end - begin == rows) & (run_start[jnp.maximum(end - 1, 0)] <= begin)
    return _Plan(
        count=jnp.sum(first, dtype=jnp.int32)[None],
        window=own,
        start=start,
        opened=opened[begin],
        gap=gap * opened[begin],
        dense=dense.astype(jnp.int32),
        order=order,
        row=slot % rows,
    )


def _kernel(*refs: Any, heads: int, rows: int, pack: int, windows: int, half: int) -> None:
    plan = _Plan(*refs[: len(_Plan._fields)])
    (
        new_hbm,  # uint32[T*K*C, 128]
        old_hbm,  # [P, K, B, ROW]
        out_hbm,  # [P, K, B, ROW], the same memory
        merged,  # [2*half, K, W, ROW]
        new,  # uint32[2*half, W*K*C, 128]
        zeros,  # [K, W, ROW]
        semaphores,  # (3, 2*half): reads of windows, reads of new rows, writes
        zero_semaphore,
    ) = refs[len(_Plan._fields) :]
    count = plan.count[0]
    width = merged.shape[-1]
    pieces = width // LANES
    row_pieces = heads * pieces

    def in_cache(cache: Any, window: jax.Array) -> Any:
        offset = pl.multiple_of(window % windows * rows, rows)
        return cache.at[window // windows, :, pl.ds(offset, rows)]

    def read(i: jax.Array, slot: jax.Array) -> Any:
        source = in_cache(old_hbm, plan.window[i])
        return pltpu.make_async_copy(source, merged.at[slot], semaphores.at[0, slot])

    def write(i: jax.Array, slot: jax.Array) -> Any:
        target = in_cache(out_hbm, plan.window[i])
        return pltpu.make_async_copy(merged.at[slot], target, semaphores.at[2, slot])

    def read_new(token: jax.Array, row: Any, length: int, slot: jax.Array) -> Any:
        source = new_hbm.at[pl.ds(plan.order[token] * row_pieces, length * row_pieces)]
        target = new.at[slot, pl.ds(row * row_pieces, length * row_pieces)]
        return pltpu.make_async_copy(source, target, semaphores.at[1, slot])

    def zero(window: jax.Array) -> Any:
        return pltpu.make_async_copy(zeros, in_cache(out_hbm, window), zero_semaphore)

    def keeps_old(i: jax.Array) -> jax.Array:
        return (plan.dense[i] == 0) & (plan.opened[i] == 0)

    def start(i: jax.Array) -> None:
        slot = i % (2 * half)

        @pl.when(keeps_old(i))
        def _() -> None:
            read(i, slot).start()

        @pl.when(plan.dense[i] == 1)
        def _() -> None:
            read_new(plan.start[i], 0, rows, slot).start()

        @pl.when(plan.dense[i] == 0)
        def _() -> None:
            @pl.loop(plan.start[i], plan.start[i + 1])
            def _(token: jax.Array) -> None:
                read_new(token, plan.row[token], 1, slot).start()

        @pl.loop(0, plan.gap[i])
        def _(j: jax.Array) -> None:
            zero(plan.window[i] + 1 + j).start()

    def wait(i: jax.Array, slot: jax.Array) -> jax.Array:
        """Wait for all reads of window i; its new rows as the bits of a number."""

        @pl.when(keeps_old(i))
        def _() -> None:
            read(i, slot).wait()

        @pl.when(plan.dense[i] == 1)
        def _() -> None:
            read_new(plan.start[i], 0, rows, slot).wait()

        def one(token: jax.Array, written: jax.Array) -> jax.Array:
            read_new(token, plan.row[token], 1, slot).wait()
            return written | jnp.left_shift(jnp.int32(1), plan.row[token])

        end = jnp.where(plan.dense[i] == 1, plan.start[i], plan.start[i + 1])
        written = jax.lax.fori_loop(plan.start[i], end, one, jnp.int32(0))
        return jnp.where(plan.dense[i] == 1, jnp.int32((1 << rows) - 1), written)

    def merge(slot: jax.Array, written: jax.Array, keep: jax.Array) -> None:
        groups, bits = rows // pack, 32 // pack
        group = jax.lax.broadcasted_iota(jnp.int32, (groups, LANES), 0)
        mask = jnp.zeros_like(group)
        for part in range(pack):
            is_new = jnp.right_shift(written, group * pack + part) & 1
            mask |= jnp.where(is_new == 1, jnp.int32(_field(part, bits)), 0)
        mask = jax.lax.bitcast_convert_type(mask, jnp.uint32)
        kept = ~mask & jnp.where(keep, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        for head, piece in itertools.product(range(heads), range(pieces)):
            packed = jnp.zeros_like(mask)
            for part in range(pack):
                first = part * row_pieces + head * pieces + piece
                word = new[slot, pl.ds(first, groups, stride=pack * row_pieces)]
                packed |= jnp.left_shift(word, jnp.uint32(part * bits))
            lanes = pl.ds(piece * LANES, LANES)
            old = pltpu.bitcast(merged[slot, head, :, lanes], jnp.uint32)
            result = (old & kept) | (packed & mask)
            merged[slot, head, :, lanes] = pltpu.bitcast(result, merged.dtype)

    if windows > 1:
        zeros[...] = jnp.zeros_like(zeros)
    for i in range(half):

        @pl.when(i < count)
        def _(i: int = i) -> None:
            start(jnp.int32(i))

    @pl.loop(0, count)
    def _(i: jax.Array) -> None:
        @pl.when(i >= half)
        def _() -> None:
            write(i - half, (i - half) % (2 * half)).wait()

        @pl.when(i + half < count)
        def _() -> None:
            start(i + half)

        slot = i % (2 * half)
        written = wait(i, slot)
        merge(slot, written, keeps_old(i))
        write(i, slot).start()

    @pl.loop(jnp.maximum(count - half, 0), count)
    def _(i: jax.Array) -> None:
        write(i, i % (2 * half)).wait()

    if windows > 1:

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            @pl.loop(0, plan.gap[i])
            def _(j: jax.Array) -> None:
                zero(plan.window[i] + 1 + j).wait()


def _field(part: int, bits: int) -> int:
    """The bits of one of the elements that share a 32-bit number, as a signed number."""
    field = ((1 << bits) - 1) << (part * bits)
    return field - (1 << 32) if field >= 1 << 31 else field
