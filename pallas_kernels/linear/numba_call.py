"""Products with weights as a custom call of XLA for CPU, compiled by Numba.

A weight is cut into panels of as many outputs as a vector has numbers. Pieces of a panel, which the
innermost cache holds, are copied or unpacked, and multiplied with all rows while the next one is
fetched. Every number of the result is summed up input by input, and piece by piece, so its bits
depend neither on the other rows nor on threads.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from ..vectors import add_product, load, load_bytes, splat, store, transpose_square, widest
from ..xla_ffi import ARGS, DATA, FRAME_WORDS, RETS, callback_of, pointer_to, prefetch
from ..xla_threads import (
    OWN,
    answer_question,
    buffer_of,
    compiled,
    is_last,
    let_go,
    next_item,
    shape_of,
    share_out,
    source_digest,
    tell_xla,
    threads_of,
)

TARGET = "octavo.linear"

_WIDTH = widest() // 2
_LINE = 4 * _WIDTH
_CACHE_LINE = 64
# Inputs of a piece: whole groups of an int8 weight.
_PIECE = 64
_GROUP, _PER_WORD = 32, 4
# Below this a second thread costs more than it helps.
_PART_BYTES = 1 << 16
_ITEMS_PER_THREAD = 8
_SQUARE = 16
_ZERO = np.float32(0)

# Words of the record of a call: addresses, sizes, panels.
_X, _WEIGHT, _SCALE, _OUT = range(OWN, OWN + 4)
_ROWS, _INPUTS, _OUTPUTS, _GROUPS, _TRANSPOSED, _PANELS, _ITEMS = range(OWN + 4, OWN + 11)
_RECORD_WORDS = OWN + 11


@compiled()
def _fill_record(record, frame):
    """Note all that the frame says; returns how many threads there are."""
    for at, index in ((_X, 0), (_WEIGHT, 1), (_SCALE, 2)):
        record[at] = buffer_of(frame[ARGS], index)[DATA]
    record[_OUT] = buffer_of(frame[RETS], 0)[DATA]
    record[_ROWS], record[_INPUTS] = shape_of(frame[ARGS], 0, 2)
    record[_OUTPUTS] = shape_of(frame[RETS], 0, 2)[1]
    record[_GROUPS] = shape_of(frame[ARGS], 2, 2)[0]
    record[_PANELS] = (record[_OUTPUTS] + _WIDTH - 1) // _WIDTH
    numbers = carray(pointer_to(buffer_of(frame[ARGS], 3)[DATA], types.int32), (2,))
    record[_TRANSPOSED] = numbers[1]
    return np.int64(numbers[0])


@compiled()
def _copy(record, panel, first, begin, count):
    """A piece of a float32 weight."""
    row = 4 * record[_OUTPUTS]
    source = record[_WEIGHT] + begin * row + 4 * first
    for _ in range(count):
        store(panel, load(source, _WIDTH))
        panel += _LINE
        source += row


@compiled()
def _transpose(record, panel, first, begin, count):
    """A piece of a float32 weight whose rows are outputs; `count` is a multiple of a square."""
    row = 4 * record[_INPUTS]
    source = record[_WEIGHT] + first * row + 4 * begin
    for n in range(0, _WIDTH, _SQUARE):
        for i in range(0, count, _SQUARE):
            transpose_square(source + n * row + 4 * i, row, panel + i * _LINE + 4 * n, _LINE)


@compiled()
def _unpack(record, panel, first, begin, count):
    """A piece of an int8 weight, and a look ahead to the next one."""
    row, groups = 4 * record[_OUTPUTS], record[_GROUPS]
    words = _GROUP // _PER_WORD
    for group in range(begin // _GROUP, (begin + count + _GROUP - 1) // _GROUP):
        scale = load(record[_SCALE] + group * row + 4 * first, _WIDTH)
        source = record[_WEIGHT] + group * row + 4 * first
        ahead = source + _PIECE // _GROUP * row
        if begin + count >= record[_INPUTS]:
            ahead = record[_WEIGHT] + (group - begin // _GROUP) * row + 4 * (first + _WIDTH)
        for _ in range(words):
            for i in range(0, _LINE, _CACHE_LINE):
                prefetch(ahead + i)
            store(panel, load_bytes(source, 0, _WIDTH) * scale)
            store(panel + _LINE, load_bytes(source, 1, _WIDTH) * scale)
            store(panel + 2 * _LINE, load_bytes(source, 2, _WIDTH) * scale)
            store(panel + 3 * _LINE, load_bytes(source, 3, _WIDTH) * scale)
            panel += 4 * _LINE
            source += groups * row
            ahead += groups * row


@compiled()
def _fill_last(record, panel, first, begin, count):
    """A piece of a panel that the weight's outputs do not fill, number by number."""
    num_outputs, groups = record[_OUTPUTS], record[_GROUPS]
    numbers = carray(pointer_to(panel, types.float32), (_PIECE, _WIDTH))
    if record[_TRANSPOSED]:
        shape = (num_outputs, record[_INPUTS])
        weight = carray(pointer_to(record[_WEIGHT], types.float32), shape)
        for n in range(num_outputs - first):
            for i in range(count):
                numbers[i, n] = weight[first + n, begin + i]
        return
    if groups == 0:
        shape = (record[_INPUTS], num_outputs)
        weight = carray(pointer_to(record[_WEIGHT], types.float32), shape)
        for i in range(count):
            for n in range(num_outputs - first):
                numbers[i, n] = weight[begin + i, first + n]
        return
    words = _GROUP // _PER_WORD
    scale = carray(pointer_to(record[_SCALE], types.float32), (groups, num_outputs))
    packed = carray(pointer_to(record[_WEIGHT], types.int8), (words, groups, num_outputs, 4))
    for i in range(count):
        group, place = divmod(begin + i, _GROUP)
        for n in range(num_outputs - first):
            number = packed[place // _PER_WORD, group, first + n, place % _PER_WORD]
            numbers[i, n] = np.float32(number) * scale[group, first + n]


@compiled()
def _fetch(address):
    for i in range(0, _LINE, _CACHE_LINE):
        prefetch(address + i)


@compiled()
def _add(out, total, is_first):
    """A piece's share, on top of what is there of earlier pieces: shorter sums err less."""
    store(out, total if is_first else load(out, _WIDTH) + total)


@compiled()
def _multiply(x, x_row, piece, out, out_row, is_first):
    """Add one row's product with a piece."""
    panel, count, ahead, ahead_row = piece
    total = splat(_ZERO, _WIDTH)
    for _ in range(count):
        _fetch(ahead)
        total = add_product(total, x, load(panel, _WIDTH))
        panel += _LINE
        ahead += ahead_row
        x += 4
    _add(out, total, is_first)


@compiled()
def _multiply_4(x, x_row, piece, out, out_row, is_first):
    """Add the products of four rows."""
    panel, count, ahead, ahead_row = piece
    zero = splat(_ZERO, _WIDTH)
    t0, t1, t2, t3 = zero, zero, zero, zero
    for _ in range(count):
        _fetch(ahead)
        line = load(panel, _WIDTH)
        t0 = add_product(t0, x, line)
        t1 = add_product(t1, x + x_row, line)
        t2 = add_product(t2, x + 2 * x_row, line)
        t3 = add_product(t3, x + 3 * x_row, line)
        panel += _LINE
        ahead += ahead_row
        x += 4
    _add(out, t0, is_first)
    _add(out + out_row, t1, is_first)
    _add(out + 2 * out_row, t2, is_first)
    _add(out + 3 * out_row, t3, is_first)


@compiled()
def _multiply_8(x, x_row, piece, out, out_row, is_first):
    """Add the products of eight rows: as many vectors as hide how long an addition takes."""
    panel, count, ahead, ahead_row = piece
    zero, y, half = splat(_ZERO, _WIDTH), x + 4 * x_row, out + 4 * out_row
    t0, t1, t2, t3, t4, t5, t6, t7 = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(count):
        _fetch(ahead)
        line = load(panel, _WIDTH)
        t0 = add_product(t0, x, line)
        t1 = add_product(t1, x + x_row, line)
        t2 = add_product(t2, x + 2 * x_row, line)
        t3 = add_product(t3, x + 3 * x_row, line)
        t4 = add_product(t4, y, line)
        t5 = add_product(t5, y + x_row, line)
        t6 = add_product(t6, y + 2 * x_row, line)
        t7 = add_product(t7, y + 3 * x_row, line)
        panel += _LINE
        ahead += ahead_row
        x += 4
        y += 4
    _add(out, t0, is_first)
    _add(out + out_row, t1, is_first)
    _add(out + 2 * out_row, t2, is_first)
    _add(out + 3 * out_row, t3, is_first)
    _add(half, t4, is_first)
    _add(half + out_row, t5, is_first)
    _add(half + 2 * out_row, t6, is_first)
    _add(half + 3 * out_row, t7, is_first)


@compiled()
def _multiply_all(record, panel, ahead, begin, count, out, out_row):
    """Add the product of all rows with a piece; with the first rows, fetch the next piece."""
    rows, x_row, row = record[_ROWS], 4 * record[_INPUTS], 4 * record[_OUTPUTS]
    piece = (panel, count, ahead, row)
    if record[_TRANSPOSED]:
        piece = (panel, count, ahead, _LINE)
    elif record[_GROUPS] > 0:
        piece = (panel, count, panel, 0)
    x, m = record[_X] + 4 * begin, 0
    while m + 8 <= rows:
        _multiply_8(x + m * x_row, x_row, piece, out + m * out_row, out_row, begin == 0)
        piece = (panel, count, panel, 0)
        m += 8
    if m + 4 <= rows:
        _multiply_4(x + m * x_row, x_row, piece, out + m * out_row, out_row, begin == 0)
        piece = (panel, count, panel, 0)
        m += 4
    while m < rows:
        _multiply(x + m * x_row, x_row, piece, out + m * out_row, out_row, begin == 0)
        m += 1


@compiled()
def _run_panel(record, first, begin, count, ahead, memory, padded):
    """Add a piece of the panel of the outputs from `first` on, in memory that the caller keeps."""
    panel = memory.ctypes.data + -memory.ctypes.data % _CACHE_LINE
    out, out_row = record[_OUT] + 4 * first, 4 * record[_OUTPUTS]
    if record[_OUTPUTS] - first < _WIDTH:
        _fill_last(record, panel, first, begin, count)
        out, out_row = padded.ctypes.data, _LINE
    elif record[_TRANSPOSED]:
        _transpose(record, panel, first, begin, count)
    elif record[_GROUPS] > 0:
        _unpack(record, panel, first, begin, count)
    else:
        _copy(record, panel, first, begin, count)
    _multiply_all(record, panel, ahead, begin, count, out, out_row)


@compiled()
def _run_item(record, index):
    """Compute the outputs of some panels, piece by piece of all of them.

    So what is fetched one after the other lies side by side.
    """
    panels, items, inputs = record[_PANELS], record[_ITEMS], record[_INPUTS]
    row = 4 * record[_OUTPUTS]
    memory = np.zeros((_PIECE + _GROUP) * _WIDTH + _CACHE_LINE // 4, np.float32)
    low, high = panels * index // items, panels * (index + 1) // items
    has_rest = high * _WIDTH > record[_OUTPUTS]
    padded = np.zeros((record[_ROWS] if has_rest else 0, _WIDTH), np.float32)
    for begin in range(0, inputs, _PIECE):
        count = min(_PIECE, inputs - begin)
        for panel in range(low, high):
            ahead = record[_WEIGHT] + begin * row + 4 * (panel + 1) * _WIDTH
            if panel + 1 == high:
                ahead = record[_WEIGHT] + (begin + count) * row + 4 * low * _WIDTH
            if record[_TRANSPOSED]:  # what lies as far behind as all inputs of a panel
                ahead = record[_WEIGHT] + 4 * (panel + 1) * _WIDTH * inputs + begin * _LINE
            _run_panel(record, panel * _WIDTH, begin, count, ahead, memory, padded)
    if has_rest:
        shape = (record[_ROWS], record[_OUTPUTS])
        result = carray(pointer_to(record[_OUT], types.float32), shape)
        first = (high - 1) * _WIDTH
        for m in range(record[_ROWS]):
            for n in range(record[_OUTPUTS] - first):
                result[m, first + n] = padded[m, n]


@compiled()
def _work(address):
    """What every thread does."""
    record = carray(pointer_to(address, types.int64), (_RECORD_WORDS,))
    while True:
        index = next_item(address)
        if index < 0:
            break
        _run_item(record, index)
        if is_last(address):
            tell_xla(address)
    let_go(address)


@compiled()
def _run(frame):
    """Serve a call; returns the address of XLA's error, 0 if there is none."""
    record = np.empty(_RECORD_WORDS, np.int64)
    num_threads = threads_of(frame, _fill_record(record, frame))
    parts = record[_INPUTS] * record[_OUTPUTS] * (4 + record[_ROWS]) // _PART_BYTES
    # Of products of many rows, panels are large enough to be items.
    num_items = max(_ITEMS_PER_THREAD * num_threads, record[_PANELS] * record[_ROWS] // 128)
    record[_ITEMS] = min(num_items, record[_PANELS])
    helpers = min(num_threads, record[_ITEMS], 1 + parts) - 1
    address, error = share_out(frame, record, record[_ITEMS], helpers, callback_of(_work))
    if address != 0:
        _work(address)
    elif error == 0:
        record[_ITEMS] = 1
        _run_item(record, 0)
    return error


def _handler_of(digest: int):
    @cfunc(types.int64(types.int64), cache=True)
    def handler(frame_address):
        frame = carray(pointer_to(frame_address, types.int64), (FRAME_WORDS,))
        return 0 if answer_question(frame) or digest < 0 else _run(frame)

    return handler


@functools.cache
def register() -> str:
    """Make the custom call known to XLA; returns its name.

    Its operands are `x float32[T, in]`, the weight, `float32[in, out]` or `int32[8, G, out]`, its
    `scale float32[G, out]` (G = 0 if it has none), and `(threads, is transposed) int32[2]`, the
    latter for a weight `float32[out, in]` (`in` a multiple of 16); its result is `float32[T, out]`.
    """
    handler = _handler_of(source_digest())
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return TARGET
