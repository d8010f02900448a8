"""What keys and values consist of, for attention on a CPU with Numba: float32, or bfloat16.

Attention computes with words of 4 bytes, each of a float32 or of a pair of bfloat16. Queries and
weights are rounded to what they meet, keys and values; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..vectors import add_product, load, store
from ..vectors_bf16 import add_pairs, load_across, neighbours, pairs_of
from ..xla_threads import compiled, compiled_for
from .numba_record import block_of

_LANES, _FEW = 16, 8


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """How to compute with one kind of numbers: functions for compiled code to call.

    Attributes:
        name: of their dtype.
        per_word: how many are in a word.
        add_word: `(total, address, vector)`: `total` and the products of a vector's words with the
            word at an address.
        pack: `(address, count)`: replace float32 by words, from the same address on.
        pack_lines_by: for vectors of a width, `(address, line, count)`: replace lines of float32
            by lines of words.
        load_values_by: for vectors of a width, `(address, row)`: words from as many rows as there
            are numbers in one.
        gather_values: `(kv, table, begin, end, k, sizes, target)`: write a chunk's values as words,
            if they are not words where they lie.
        values_of: `(kv, table, b, begin, k, sizes, target)`: where the words of a block's values
            begin then, and how many bytes there are from one row of them to the next.
    """

    name: str
    per_word: int
    add_word: Any
    pack: Any
    pack_lines_by: Callable[[int], Any]
    load_values_by: Callable[[int], Any]
    gather_values: Any
    values_of: Any


@compiled()
def _block_address(kv, table, b, k, sizes):
    num_kv_heads, block_size, row, _, pool = sizes
    return kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row


# ---- float32: words already --------------------------------------------------------------------


@compiled()
def _keep(address, count):
    pass


def _keep_lines_by(width: int):
    @compiled_for(width)
    def keep_lines(address, line, count):
        pass

    return keep_lines


def _load_by(width: int):
    @compiled_for(width)
    def load_values(address, row):
        return load(address, width)

    return load_values


@compiled()
def _gather_nothing(kv, table, begin, end, k, sizes, target):
    pass


@compiled()
def _values_in_cache(kv, table, b, begin, k, sizes, target):
    return _block_address(kv, table, b, k, sizes) + 4 * sizes[3], sizes[2]


FLOAT32 = Numbers(
    name="float32",
    per_word=1,
    add_word=add_product,
    pack=_keep,
    pack_lines_by=_keep_lines_by,
    load_values_by=_load_by,
    gather_values=_gather_nothing,
    values_of=_values_in_cache,
)


# ---- bfloat16: pairs of a head's numbers in keys, of two keys' in values -----------------------


@compiled()
def _pack(address, count):
    done = count // _LANES * _LANES
    for i in range(0, done, _LANES):
        store(address + 2 * i, neighbours(address + 4 * i, _FEW))
    for i in range(done, count, 4):
        store(address + 2 * i, neighbours(address + 4 * i, 2))


def _pack_lines_by(width: int):
    @compiled_for(width)
    def pack_lines(address, line, count):
        target = address
        for _ in range(0, count, 2):
            store(target, pairs_of(load(address, width), load(address + line, width)))
            target += line
            address += 2 * line

    return pack_lines


def _load_across_by(width: int):
    @compiled_for(width)
    def load_values(address, row):
        return load_across(address, address + row, width)

    return load_values


@compiled()
def _gather_pairs(kv, table, begin, end, k, sizes, target):
    _, block_size, row, head_size, _ = sizes
    for b in range(begin, end):
        value = _block_address(kv, table, b, k, sizes) + 2 * head_size
        for _ in range(0, block_size, 2):
            if head_size % _LANES == 0:
                for h in range(0, head_size, _LANES):
                    pairs = load_across(value + 2 * h, value + row + 2 * h, _LANES)
                    store(target + 4 * h, pairs)
            else:
                for h in range(0, head_size, 4):
                    store(target + 4 * h, load_across(value + 2 * h, value + row + 2 * h, 4))
            target += 4 * head_size
            value += 2 * row


@compiled()
def _gathered_values(kv, table, b, begin, k, sizes, target):
    _, block_size, _, head_size, _ = sizes
    return target + (b - begin) * (block_size // 2) * 4 * head_size, 4 * head_size


BFLOAT16 = Numbers(
    name="bfloat16",
    per_word=2,
    add_word=add_pairs,
    pack=_pack,
    pack_lines_by=_pack_lines_by,
    load_values_by=_load_across_by,
    gather_values=_gather_pairs,
    values_of=_gathered_values,
)
