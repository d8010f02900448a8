"""`write_kv` on TPU: each touched window of a block is read, merged with its new rows, and
written back.

A *window* is 8 or 16 rows of one block, all heads. Mosaic moves rows of packed dtypes only in
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

_MAX_TOKENS = 32768  # four numbers each, of SMEM's 1 MiB
# Half of the buffers wait for reads and half for writes.
_MAX_BUFFERS = 8
_BUFFER_BYTES = 6 << 20


def write_kv_mosaic_tpu(
    kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    _, heads, block_size, width = kv_cache.shape
    # Single tokens move less in small windows; long runs need fewer large ones. Modelled on v6e (8
    # heads, H=128, bfloat16), in cycles: a lone token 206 with 8 rows and 252 with 16, a token of
    # a run 21 and 14.
    rows = math.gcd(block_size, 8 if slots.shape[0] <= 512 else 16)
    _check(slots.shape[0], rows, kv_cache)

    item_bytes = heads * rows * width * (4 + kv_cache.dtype.itemsize)
    half = max(1, min(_MAX_BUFFERS, _BUFFER_BYTES // item_bytes) // 2)
    tokens = _sort(slots, kv_cache, rows)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, block_size=block_size, heads=heads, rows=rows, half=half),
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        in_specs=[*[smem] * len(tokens), hbm, hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.VMEM((2 * half, heads, rows, width), kv_cache.dtype),
            pltpu.VMEM((2 * half, rows * heads * width // LANES, LANES), jnp.uint32),
            pltpu.VMEM((heads, rows, width), kv_cache.dtype),
            pltpu.SMEM((5, 2 * half), jnp.int32),
            pltpu.SemaphoreType.DMA((3, 2 * half)),
            pltpu.SemaphoreType.DMA(()),
        ],
        input_output_aliases={len(tokens) + 1: 0},
        interpret=interpret_argument(),
        name="octavo_write_kv",
    )(*tokens, _unpacked_rows(k, v, kv_cache, rows), kv_cache)


def _check(num_tokens: int, rows: int, kv_cache: jax.Array) -> None:
    width = kv_cache.shape[-1]
    if kv_cache.dtype == jnp.float16:
        raise NotImplementedError("Mosaic has no float16 on TPU")
    if width % LANES:
        raise NotImplementedError(f"rows of {width} elements are not a multiple of {LANES} on TPU")
    if rows % 4:
        raise NotImplementedError("blocks of a size that is no multiple of 4 have no aligned rows")
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


class _Tokens(NamedTuple):
    """The tokens by slot, in SMEM.

    Attributes:
        windows: `int32[1]` windows that have tokens.
        slot: `int32[T+1]`, ascending; `P*B` for a token that writes nothing, and at the end.
        order: `int32[T+1]`: which token of the call it is.
        end: `int32[T+1]`: first token after this one that is in another window.
        is_run: `int32[T+1]`: 1 if a window's tokens fill it and follow each other in the call.
    """

    windows: jax.Array
    slot: jax.Array
    order: jax.Array
    end: jax.Array
    is_run: jax.Array


def _sort(slots: jax.Array, kv_cache: jax.Array, rows: int) -> _Tokens:
    num_blocks, _, block_size, _ = kv_cache.shape
    past = num_blocks * block_size
    slots = jnp.append(slots, jnp.int32(past))
    is_live = (slots >= block_size) & (slots < past)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    slot, order = jax.lax.sort((jnp.where(is_live, slots, past), token), num_keys=1)
    window = slot // rows
    is_first = (window != jnp.roll(window, 1)) | (token == 0)
    first = jax.lax.cummin(jnp.where(is_first, token, token.shape[0]), reverse=True)
    end = jnp.append(first[1:], jnp.int32(token.shape[0]))
    is_run = (slot % rows == 0) & (end - token == rows)
    for i in range(1, rows):
        is_run &= (jnp.roll(slot, -i) - slot == i) & (jnp.roll(order, -i) - order == i)
    windows = jnp.sum(is_first & (slot < past), dtype=jnp.int32)[None]
    return _Tokens(windows, slot, order, end, is_run.astype(jnp.int32))


# Rows of the ring in SMEM: what is known of a window between its reads and its write.
_WINDOW, _IS_RUN, _TOKENS, _WRITTEN, _KEEPS = range(5)


def _kernel(
    num_windows: Any,  # int32[1]
    token_slot: Any,  # int32[T+1]
    token_order: Any,  # int32[T+1]
    token_end: Any,  # int32[T+1]
    token_is_run: Any,  # int32[T+1]
    new_hbm: Any,  # uint32[T*K*C, 128]
    old_hbm: Any,  # [P, K, B, ROW]
    out_hbm: Any,  # [P, K, B, ROW], the same memory
    merged: Any,  # [2*half, K, W, ROW]
    new: Any,  # uint32[2*half, W*K*C, 128]
    zeros: Any,  # [K, W, ROW]
    ring: Any,  # int32[5, 2*half]
    semaphores: Any,  # (3, 2*half): reads of windows, reads of new rows, writes
    zero_semaphore: Any,
    *,
    block_size: int,
    heads: int,
    rows: int,
    half: int,
) -> None:
    visits = num_windows[0]
    windows = block_size // rows
    pack = 4 // merged.dtype.itemsize
    pieces = merged.shape[-1] // LANES
    row_pieces = heads * pieces

    def in_cache(cache: Any, window: jax.Array) -> Any:
        offset = pl.multiple_of(jax.lax.rem(window, windows) * rows, rows)
        return cache.at[jax.lax.div(window, windows), :, pl.ds(offset, rows)]

    def read(window: jax.Array, slot: jax.Array) -> Any:
        source = in_cache(old_hbm, window)
        return pltpu.make_async_copy(source, merged.at[slot], semaphores.at[0, slot])

    def read_new(token: Any, row: Any, length: int, slot: jax.Array) -> Any:
        source = new_hbm.at[pl.ds(token * row_pieces, length * row_pieces)]
        target = new.at[slot, pl.ds(row * row_pieces, length * row_pieces)]
        return pltpu.make_async_copy(source, target, semaphores.at[1, slot])

    def write(window: jax.Array, slot: jax.Array) -> Any:
        target = in_cache(out_hbm, window)
        return pltpu.make_async_copy(merged.at[slot], target, semaphores.at[2, slot])

    def zero(window: jax.Array) -> Any:
        return pltpu.make_async_copy(zeros, in_cache(out_hbm, window), zero_semaphore)

    def start(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Start the reads of window i, whose first token is `first`; the state after it."""
        first, opened, zeroed = state
        slot = jax.lax.rem(i, 2 * half)
        window = jax.lax.div(token_slot[first], rows)
        block = jax.lax.div(window, windows)
        opened = jnp.where(token_slot[first] == block * block_size, block, opened)
        is_run = token_is_run[first] == 1
        end = token_end[first]
        keeps = ~is_run & (block != opened)

        @pl.when(keeps)
        def _() -> None:
            read(window, slot).start()

        @pl.when(is_run)
        def _() -> None:
            read_new(token_order[first], 0, rows, slot).start()

        def one(token: jax.Array, written: jax.Array) -> jax.Array:
            row = jax.lax.rem(token_slot[token], rows)
            read_new(token_order[token], row, 1, slot).start()
            return written | jnp.left_shift(jnp.int32(1), row)

        singles = jnp.where(is_run, end, first)
        everything = jnp.where(is_run, jnp.int32((1 << rows) - 1), 0)
        written = jax.lax.fori_loop(singles, end, one, everything)
        ring[_WINDOW, slot] = window
        ring[_IS_RUN, slot] = is_run.astype(jnp.int32)
        ring[_TOKENS, slot] = end - singles
        ring[_WRITTEN, slot] = written
        ring[_KEEPS, slot] = keeps.astype(jnp.int32)
        if windows == 1:
            return end, opened, zeroed

        # The windows of an opened block up to its next token, or its end, get none.
        last = jnp.minimum(jax.lax.div(token_slot[end], rows), (block + 1) * windows)
        last = jnp.where(block == opened, last, window)

        @pl.loop(window + 1, last)
        def _(empty: jax.Array) -> None:
            zero(empty).start()

        return end, opened, zeroed + jnp.maximum(last - window - 1, 0)

    def wait(slot: jax.Array) -> None:
        @pl.when(ring[_KEEPS, slot] == 1)
        def _() -> None:
            read(ring[_WINDOW, slot], slot).wait()

        @pl.when(ring[_IS_RUN, slot] == 1)
        def _() -> None:
            read_new(0, 0, rows, slot).wait()

        @pl.loop(0, ring[_TOKENS, slot])
        def _(_: jax.Array) -> None:
            read_new(0, 0, 1, slot).wait()

    def merge(slot: jax.Array) -> None:
        groups, bits = rows // pack, 32 // pack
        group = jax.lax.broadcasted_iota(jnp.int32, (groups, LANES), 0)
        mask = jnp.zeros_like(group)
        for part in range(pack):
            is_new = jnp.right_shift(ring[_WRITTEN, slot], group * pack + part) & 1
            mask |= jnp.where(is_new == 1, jnp.int32(_field(part, bits)), 0)
        mask = jax.lax.bitcast_convert_type(mask, jnp.uint32)
        keeps = jnp.where(ring[_KEEPS, slot] == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
        kept = ~mask & keeps
        for head, piece in itertools.product(range(heads), range(pieces)):
            packed = jnp.zeros_like(mask)
            for part in range(pack):
                first = part * row_pieces + head * pieces + piece
                word = new[slot, pl.ds(first, groups, stride=pack * row_pieces)]
                # Rows without a token hold anything: it must not reach their neighbours' bits.
                word &= jnp.uint32((1 << bits) - 1)
                packed |= jnp.left_shift(word, jnp.uint32(part * bits))
            lanes = pl.ds(piece * LANES, LANES)
            old = pltpu.bitcast(merged[slot, head, :, lanes], jnp.uint32)
            result = (old & kept) | (packed & mask)
            merged[slot, head, :, lanes] = pltpu.bitcast(result, merged.dtype)

    def start_if_any(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return jax.lax.cond(i < visits, lambda: start(i, state), lambda: state)

    if windows > 1:
        zeros[...] = jnp.zeros_like(zeros)
    state = jnp.int32(0), jnp.int32(-1), jnp.int32(0)
    for i in range(half):
        state = start_if_any(jnp.int32(i), state)

    def visit(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        @pl.when(i >= half)
        def _() -> None:
            before = jax.lax.rem(i - half, 2 * half)
            write(ring[_WINDOW, before], before).wait()

        state = start_if_any(i + half, state)
        slot = jax.lax.rem(i, 2 * half)
        wait(slot)
        merge(slot)
        write(ring[_WINDOW, slot], slot).start()
        return state

    _, _, zeroed = jax.lax.fori_loop(0, visits, visit, state)

    @pl.loop(jnp.maximum(visits - half, 0), visits)
    def _(i: jax.Array) -> None:
        slot = jax.lax.rem(i, 2 * half)
        write(ring[_WINDOW, slot], slot).wait()

    if windows > 1:

        @pl.loop(0, zeroed)
        def _(_: jax.Array) -> None:
            zero(jnp.int32(windows)).wait()


def _field(part: int, bits: int) -> int:
    """The bits of one of the elements that share a 32-bit number, as a signed number."""
    field = ((1 << bits) - 1) << (part * bits)
    return field - (1 << 32) if field >= 1 << 31 else field
