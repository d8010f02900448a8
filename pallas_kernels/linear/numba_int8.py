"""Products of rows in int8 with panels in int8, compiled by Numba.

Of each row and group of inputs the products are summed up exactly, as whole numbers, and then
multiplied with both factors. The instruction multiplies unsigned with signed bytes: the weights get
128 added, and what this adds to a sum is taken off at its start.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from ..vectors import add_product, load, splat, store
from ..vectors_int8 import (
    LANES,
    add_dots,
    as_numbers,
    largest_magnitude,
    load_unsigned,
    splat_word,
    store_rounded,
)
from ..xla_ffi import pointer_to, prefetch
from ..xla_threads import address_of, compiled
from .packed import GROUP, SMALLEST, WORDS_PER_GROUP, WORDS_PER_ROW_GROUP, panel_width

_LINE = 4 * panel_width()
_PART = 4 * LANES
# Bytes of a group of a row, and where its factor and what sums begin with lie.
ROW_GROUP = 4 * WORDS_PER_ROW_GROUP
_FACTOR, _OFFSET = 4 * WORDS_PER_GROUP, 4 * WORDS_PER_GROUP + 4
_SMALLEST, _MOST = np.float32(SMALLEST), np.float32(127)
_CACHE_LINE = 64
_GROUP_BYTES = WORDS_PER_GROUP * _LINE
# How far ahead what is read in one go is fetched.
_AHEAD = 64 * _LINE
_ZERO = np.float32(0)


@compiled()
def _multiply(x, weight, scale, groups, out):
    """One row's product."""
    t, u = splat(_ZERO, LANES), splat(_ZERO, LANES)
    for _ in range(groups):
        a = splat_word(x + _OFFSET)
        b = a
        for _ in range(WORDS_PER_GROUP):
            prefetch(weight + _AHEAD)
            prefetch(weight + _AHEAD + _CACHE_LINE)
            own = splat_word(x)
            a = add_dots(a, load_unsigned(weight), own)
            b = add_dots(b, load_unsigned(weight + _PART), own)
            x += 4
            weight += _LINE
        t = add_product(t, x, as_numbers(a) * load(scale, LANES))
        u = add_product(u, x, as_numbers(b) * load(scale + _PART, LANES))
        x += ROW_GROUP - _FACTOR
        scale += _LINE
    store(out, t)
    store(out + _PART, u)


@compiled()
def _multiply_4(x, row, weight, scale, groups, out, out_row, ahead):
    """Four rows' products: as many vectors as hide how long an addition takes.

    Of each group's words, what lies between the two addresses of `ahead` is fetched meanwhile.
    """
    fetched, end = ahead
    zero = splat(_ZERO, LANES)
    t0, t1, t2, t3, u0, u1, u2, u3 = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(groups):
        for address in range(fetched, end, _CACHE_LINE):
            prefetch(address)
        fetched += _GROUP_BYTES
        end += _GROUP_BYTES
        begin = x + _OFFSET
        a0, a1 = splat_word(begin), splat_word(begin + row)
        a2, a3 = splat_word(begin + 2 * row), splat_word(begin + 3 * row)
        b0, b1, b2, b3 = a0, a1, a2, a3
        for _ in range(WORDS_PER_GROUP):
            first, second = load_unsigned(weight), load_unsigned(weight + _PART)
            own = splat_word(x)
            a0, b0 = add_dots(a0, first, own), add_dots(b0, second, own)
            own = splat_word(x + row)
            a1, b1 = add_dots(a1, first, own), add_dots(b1, second, own)
            own = splat_word(x + 2 * row)
            a2, b2 = add_dots(a2, first, own), add_dots(b2, second, own)
            own = splat_word(x + 3 * row)
            a3, b3 = add_dots(a3, first, own), add_dots(b3, second, own)
            weight += _LINE
            x += 4
        first, second = load(scale, LANES), load(scale + _PART, LANES)
        t0 = add_product(t0, x, as_numbers(a0) * first)
        t1 = add_product(t1, x + row, as_numbers(a1) * first)
        t2 = add_product(t2, x + 2 * row, as_numbers(a2) * first)
        t3 = add_product(t3, x + 3 * row, as_numbers(a3) * first)
        u0 = add_product(u0, x, as_numbers(b0) * second)
        u1 = add_product(u1, x + row, as_numbers(b1) * second)
        u2 = add_product(u2, x + 2 * row, as_numbers(b2) * second)
        u3 = add_product(u3, x + 3 * row, as_numbers(b3) * second)
        x += ROW_GROUP - _FACTOR
        scale += _LINE
    _store(out, t0, u0)
    _store(out + out_row, t1, u1)
    _store(out + 2 * out_row, t2, u2)
    _store(out + 3 * out_row, t3, u3)


@compiled()
def _store(out, first, second):
    store(out, first)
    store(out + _PART, second)


@compiled()
def multiply_panel(x, weight, scale, groups, rows, out, out_row, ahead):
    """The products of `rows` rows, as `round_rows` leaves them, with a panel.

    The panel at the address `ahead` is fetched meanwhile, a part of it with each four rows.
    """
    row = groups * ROW_GROUP
    m, fours, fetched = 0, rows // 4, 0
    while m + 4 <= rows:
        end = _GROUP_BYTES * (m // 4 + 1) // fours // _CACHE_LINE * _CACHE_LINE
        part = ahead + fetched, ahead + end
        _multiply_4(x + m * row, row, weight, scale, groups, out + m * out_row, out_row, part)
        m, fetched = m + 4, end
    while m < rows:
        _multiply(x + m * row, weight, scale, groups, out + m * out_row)
        m += 1


@compiled()
def round_rows(x, rows, inputs, target):
    """Round every group of rows to int8: its numbers, their factor, and what sums begin with."""
    last = np.zeros(GROUP, np.float32)
    for _ in range(rows):
        for begin in range(0, inputs, GROUP):
            source = x + 4 * begin
            if begin + GROUP > inputs:
                numbers = carray(pointer_to(source, types.float32), (inputs - begin,))
                last[: inputs - begin] = numbers
                source = address_of(last)
            _round_group(source, target)
            target += ROW_GROUP
        x += 4 * inputs


@compiled()
def _round_group(source, target):
    numbers = load(source, GROUP)
    largest = largest_magnitude(numbers)
    factor = _MOST / largest if largest > _SMALLEST else _ZERO
    total = store_rounded(target, numbers * splat(factor, GROUP))
    carray(pointer_to(target + _FACTOR, types.float32), (1,))[0] = largest / _MOST
    carray(pointer_to(target + _OFFSET, types.int32), (1,))[0] = -128 * total
