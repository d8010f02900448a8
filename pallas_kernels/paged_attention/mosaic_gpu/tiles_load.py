# The kernels need the Mosaic GPU of JAX 0.12; type checkers also see the one of JAX 0.10.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

"""The loading warpgroup of the Hopper prefill kernel: one box of TMA per block of keys or values.

A cache of 8-bit numbers is loaded as 16-bit words, which the same warpgroup turns into bfloat16
operands while the compute warpgroups multiply: the low bytes of all words of a head, then the
high bytes. `Columns` says which columns of the operands are whose.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .upcast import split_words

_PIECE = 64  # rows, and at most as many words of a row, in registers at once
# What an e4m3 number is too small by after its bits have moved to a bfloat16's place.
_E4M3_FACTOR = 2.0**120


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of a head of H numbers as operands.

    Attributes:
        head_size: H.
        parts: 1 if a 16-bit word of the cache is one number, 2 if it is two.
    """

    head_size: int
    parts: int

    @property
    def words(self) -> int:
        """Words of a head in the cache."""
        return self.head_size // self.parts

    @property
    def box(self) -> int:
        """Words that are loaded. Past a key they meet zeros of q; before a value they are cut."""
        return self.words if self.parts == 1 else -(-self.words // 16) * 16

    @property
    def width(self) -> int:
        """Columns of an operand."""
        return self.parts * self.box

    def operand_dtype(self, cache_dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
        return cache_dtype if self.parts == 1 else jnp.bfloat16

    def split_queries(self, q: jax.Array) -> jax.Array:
        """Queries `[..., H]` in the order of the operands' columns `[..., width]`."""
        if self.parts == 1:
            return q
        q = jnp.swapaxes(q.reshape(*q.shape[:-1], self.words, 2), -1, -2)
        pad = ((0, 0),) * (q.ndim - 1) + ((0, self.box - self.words),)
        return jnp.pad(q, pad).reshape(*q.shape[:-2], self.width)

    def join_values(self, out: jax.Array) -> jax.Array:
        """Undo the order: output `[..., width]` to `[..., H]`."""
        if self.parts == 1:
            return out
        out = out.reshape(*out.shape[:-1], 2, self.box)[..., self.box - self.words :]
        return jnp.swapaxes(out, -1, -2).reshape(*out.shape[:-2], self.head_size)

    def cache_words(self, kv_cache: jax.Array) -> jax.Array:
        """The cache `[P, K, B, 2H]` in words: another view of the same memory."""
        if self.parts == 1:
            return kv_cache
        pairs = kv_cache.reshape(*kv_cache.shape[:3], self.head_size, 2)
        return lax.bitcast_convert_type(pairs, jnp.uint16)


def swizzled(shape: tuple[int, ...], dtype: Any, step: int) -> Any:
    """Shared memory of 16-bit numbers in swizzled tiles, `step` (16, 32 or 64) columns wide."""
    gpu: Any = plgpu  # type checkers take the transforms for abstract classes
    transforms = (gpu.TilingTransform((8, step)), gpu.SwizzleTransform(2 * step))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Stream(NamedTuple):
    """Keys or values on their way: a ring of operands, its barriers, the cache's columns."""

    ring: Any  # [stages, C, width]
    landed: Any
    freed: Any
    columns: Any


def upcast(
    words: jax.Array, dtype: jax.typing.DTypeLike, layout: Any, *, interpreted: bool
) -> tuple[jax.Array, ...]:
    """The low and the high bytes of `uint16` words, numbers of `dtype`, as exact bfloat16."""
    parts = split_words(words, dtype, layout, interpreted=interpreted)
    if dtype == jnp.int8 or interpreted:
        return parts
    # Here, where it is exact: small outputs would be subnormal until the end otherwise.
    return tuple(part * jnp.bfloat16(_E4M3_FACTOR) for part in parts)


def load(seq, kv_head, first, last, block_tables_ref, kv_ref, streams: tuple[Stream, Stream]):
    """Copy the chunks `[first, last)` of keys and values."""
    stages, block_kv, _ = streams[0].ring.shape

    @pl.loop(first, last)
    def _(chunk):
        step = chunk - first
        slot = lax.rem(step, jnp.int32(stages))
        boxes = _boxes(seq, kv_head, chunk, block_tables_ref, kv_ref, block_kv)
        for stream in streams:
            _wait_if(step >= stages, stream.freed.at[slot])
            _copy(boxes, kv_ref, stream.columns, stream.ring.at[slot], stream.landed.at[slot])


def load_and_upcast(
    seq,
    kv_head,
    first,
    last,
    block_tables_ref,
    kv_ref,
    streams: tuple[Stream, Stream],
    words_ring,  # [units, C, box] uint16
    words_landed,
    dtype: Any,
    *,
    interpreted: bool,
):
    """Copy the chunks `[first, last)` of an 8-bit cache and turn them into operands.

    The words of keys and of values alternate in one ring, which runs ahead of the operands.
    """
    stages, block_kv, _ = streams[0].ring.shape
    units, _, box = words_ring.shape
    starts = [stream.columns.start for stream in streams]
    piece = box if box <= _PIECE else math.gcd(box, _PIECE)

    def fetch(unit):
        slot = lax.rem(unit, jnp.int32(units))
        start = jnp.where(lax.rem(unit, jnp.int32(2)) == 0, starts[0], starts[1])
        chunk = first + lax.div(unit, jnp.int32(2))
        boxes = _boxes(seq, kv_head, chunk, block_tables_ref, kv_ref, block_kv)
        columns = pl.ds(start, box)
        _copy(boxes, kv_ref, columns, words_ring.at[slot], words_landed.at[slot])

    num_units = 2 * (last - first)

    @pl.loop(0, lax.min(num_units, jnp.int32(units)))
    def _(unit):
        fetch(unit)

    @pl.loop(first, last)
    def _(chunk):
        step = chunk - first
        slot = lax.rem(step, jnp.int32(stages))
        for index, stream in enumerate(streams):
            unit = 2 * step + index
            words_slot = lax.rem(unit, jnp.int32(units))
            plgpu.barrier_wait(words_landed.at[words_slot])
            _wait_if(step >= stages, stream.freed.at[slot])
            for row, column in itertools.product(range(0, block_kv, _PIECE), range(0, box, piece)):
                rows = pl.ds(row, _PIECE)
                words_ref = words_ring.at[words_slot, rows, pl.ds(column, piece)]
                words = plgpu.load(words_ref, layout=plgpu.Layout.WGMMA)
                parts = upcast(words, dtype, plgpu.Layout.WGMMA, interpreted=interpreted)
                for part, numbers in enumerate(parts):
                    columns = pl.ds(part * box + column, piece)
                    stream.ring.at[slot, rows, columns][...] = numbers
            plgpu.commit_smem()
            plgpu.barrier_arrive(stream.landed.at[slot])
            pl.when(unit + units < num_units)(functools.partial(fetch, unit + units))


def _wait_if(condition, barrier):
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _boxes(seq, kv_head, chunk, block_tables_ref, kv_ref, block_kv: int):
    """`[(block id, KV head, slots)]` that make up a chunk."""
    block_size = kv_ref.shape[2]
    rows = min(block_size, block_kv)
    position = chunk * block_kv
    start = lax.rem(position, jnp.int32(block_size)) if rows < block_size else 0
    return [
        (
            block_tables_ref[seq, lax.div(position + row, jnp.int32(block_size))],
            kv_head,
            pl.ds(start, rows),
        )
        for row in range(0, block_kv, rows)
    ]


def _copy(boxes, kv_ref, columns, chunk_ref, landed):
    for index, (block, kv_head, slots) in enumerate(boxes):
        rows = pl.ds(index * slots.size, slots.size)
        plgpu.copy_gmem_to_smem(
            kv_ref.at[block, kv_head, slots, columns], chunk_ref.at[rows], landed
        )
