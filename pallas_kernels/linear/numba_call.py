"""Products with weights as a custom call of XLA for CPU, compiled by Numba.

A weight lies in panels of as many outputs as a vector has numbers, so that it is read from one end
to the other. Pieces of a panel are unpacked if need be, and multiplied with a tile of rows, which
the second cache holds, while what follows is fetched. Every number of the result is summed up input
by input, and piece by piece, so its bits depend neither on the other rows nor on threads.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from ..vectors import add_product, load, load_bytes, splat, store
from ..xla_ffi import ARGS, DATA, FRAME_WORDS, RETS, callback_of, pointer_to, prefetch
from ..xla_threads import (
    OWN,
    address_of,
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
from .numba_int8 import ROW_GROUP, multiply_panel, round_rows
from .packed import GROUP, WORDS_PER_GROUP, panel_width

TARGET = "octavo.linear"

_WIDTH = panel_width()
_LINE = 4 * _WIDTH
_CACHE_LINE = 64
# Inputs of a piece, which every row goes through before the next; of an int8 weight whole groups,
# as many as the innermost cache holds unpacked.
_PIECE, _UNPACKED_PIECE = 576, 64
# How far ahead what is read in one go is fetched.
_AHEAD = 128 * _LINE
# Of the rows that are multiplied with one panel after the other.
_TILE_BYTES = 1 << 19
# Below this a second thread costs more than it helps.
_PART_BYTES = 1 << 16
_PARTS_PER_THREAD = 8
_ZERO = np.float32(0)

# Words of the record of a call: addresses, sizes, rows of a tile, parts of all panels, threads.
_X, _WEIGHT, _SCALE, _OUT, _INT8_X = range(OWN, OWN + 5)
_ROWS, _INPUTS, _OUTPUTS, _GROUPS, _PANELS, _TILE, _PARTS, _THREADS = range(OWN + 5, OWN + 13)
_RECORD_WORDS = OWN + 13


@compiled()
def _fill_record(record, frame):
    """Note all that the frame says; returns how many threads there are."""
    for at, index in ((_X, 0), (_WEIGHT, 1), (_SCALE, 2)):
        record[at] = buffer_of(frame[ARGS], index)[DATA]
    record[_OUT] = buffer_of(frame[RETS], 0)[DATA]
    record[_INT8_X] = buffer_of(frame[RETS], 1)[DATA] if shape_of(frame[RETS], 1, 2)[1] > 0 else 0
    record[_ROWS], record[_INPUTS] = shape_of(frame[ARGS], 0, 2)
    record[_OUTPUTS] = shape_of(frame[RETS], 0, 2)[1]
    record[_GROUPS] = shape_of(frame[ARGS], 2, 3)[1]
    record[_PANELS] = record[_OUTPUTS] // _WIDTH
    return np.int64(carray(pointer_to(buffer_of(frame[ARGS], 3)[DATA], types.int32), (1,))[0])


@compiled()
def _fetch(address):
    for i in range(0, _LINE, _CACHE_LINE):
        prefetch(address + i)


@compiled()
def _unpack(record, memory, panel, begin, count):
    """A piece of a panel in int8."""
    groups = record[_GROUPS]
    for group in range(begin // GROUP, (begin + count + GROUP - 1) // GROUP):
        at = panel * groups + group
        scale = load(record[_SCALE] + at * _LINE, _WIDTH)
        source = record[_WEIGHT] + at * WORDS_PER_GROUP * _LINE
        for _ in range(WORDS_PER_GROUP):
            _fetch(source + _AHEAD)
            store(memory, load_bytes(source, 0, _WIDTH) * scale)
            store(memory + _LINE, load_bytes(source, 1, _WIDTH) * scale)
            store(memory + 2 * _LINE, load_bytes(source, 2, _WIDTH) * scale)
            store(memory + 3 * _LINE, load_bytes(source, 3, _WIDTH) * scale)
            memory += 4 * _LINE
            source += _LINE


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
def _multiply_words(record, panel, x, begin, count, out):
    """Add one row's product with a piece in int8, of whole groups, as it is unpacked."""
    total = splat(_ZERO, _WIDTH)
    for group in range(begin // GROUP, (begin + count) // GROUP):
        at = panel * record[_GROUPS] + group
        scale = load(record[_SCALE] + at * _LINE, _WIDTH)
        source = record[_WEIGHT] + at * WORDS_PER_GROUP * _LINE
        for _ in range(WORDS_PER_GROUP):
            _fetch(source + _AHEAD)
            total = add_product(total, x, load_bytes(source, 0, _WIDTH) * scale)
            total = add_product(total, x + 4, load_bytes(source, 1, _WIDTH) * scale)
            total = add_product(total, x + 8, load_bytes(source, 2, _WIDTH) * scale)
            total = add_product(total, x + 12, load_bytes(source, 3, _WIDTH) * scale)
            source += _LINE
            x += 16
    _add(out, total, begin == 0)


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
def _multiply_all(record, piece, begin, x, rows, out):
    """Add the products of some rows, and fetch what `piece` says, a part with each eight."""
    x_row, out_row = 4 * record[_INPUTS], 4 * record[_OUTPUTS]
    m, is_first = 0, begin == 0
    panel, count, ahead, ahead_row = piece
    again = (panel, count, panel, 0)
    if rows >= 16:
        ahead_row //= rows // 8
    while m + 8 <= rows:
        piece = (panel, count, ahead, ahead_row)
        _multiply_8(x + m * x_row, x_row, piece, out + m * out_row, out_row, is_first)
        piece = again
        ahead += count * ahead_row
        m += 8
    if m + 4 <= rows:
        _multiply_4(x + m * x_row, x_row, piece, out + m * out_row, out_row, is_first)
        piece = again
        m += 4
    while m < rows:
        _multiply(x + m * x_row, x_row, piece, out + m * out_row, out_row, is_first)
        piece = again
        m += 1


@compiled()
def _run_item(record, index):
    """Compute a tile of rows of some panels' outputs."""
    panels, parts = record[_PANELS], record[_PARTS]
    tile, part = index // parts, index % parts
    first = tile * record[_TILE]
    rows = first, min(record[_TILE], record[_ROWS] - first)
    if record[_INT8_X] != 0:
        last = panels * (part + 1) // parts - 1
        for panel in range(panels * part // parts, last + 1):
            # Threads take parts in turn. Behind the last panel nothing is read: it is a hint.
            ahead = panel + 1 if panel < last else panels * (part + record[_THREADS]) // parts
            _run_int8_panel(record, panel, rows, ahead)
        return
    own = np.empty((_UNPACKED_PIECE + GROUP) * _WIDTH + _CACHE_LINE // 4, np.float32)
    for panel in range(panels * part // parts, panels * (part + 1) // parts):
        _run_panel(record, panel, rows, own)


@compiled()
def _run_int8_panel(record, panel, rows, ahead):
    """Compute a panel's outputs for `(first, count)` rows in int8, and fetch panel `ahead`."""
    groups, out_row = record[_GROUPS], 4 * record[_OUTPUTS]
    x = record[_INT8_X] + rows[0] * groups * ROW_GROUP
    size = groups * WORDS_PER_GROUP * _LINE
    weight = record[_WEIGHT] + panel * size
    scale = record[_SCALE] + panel * groups * _LINE
    out = record[_OUT] + rows[0] * out_row + panel * _LINE
    ahead = record[_WEIGHT] + ahead * size
    multiply_panel(x, weight, scale, groups, rows[1], out, out_row, ahead)


@compiled()
def _run_panel(record, panel, rows, own):
    """Compute a panel's outputs for `(first, count)` rows, in memory that the caller keeps."""
    memory = address_of(own)
    memory += -memory % _CACHE_LINE
    inputs = record[_INPUTS]
    first_x = record[_X] + 4 * rows[0] * inputs
    first_out = record[_OUT] + 4 * rows[0] * record[_OUTPUTS] + panel * _LINE
    most = _UNPACKED_PIECE if record[_GROUPS] > 0 else _PIECE
    for begin in range(0, inputs, most):
        count = min(most, inputs - begin)
        if record[_GROUPS] > 0 and record[_ROWS] == 1 and count % GROUP == 0:
            _multiply_words(record, panel, first_x + 4 * begin, begin, count, first_out)
            continue
        elif record[_GROUPS] > 0:
            _unpack(record, memory, panel, begin, count)
            piece = (memory, count, memory, 0)
        else:
            source = record[_WEIGHT] + (panel * inputs + begin) * _LINE
            piece = (source, count, source + _AHEAD, _LINE)
        _multiply_all(record, piece, begin, first_x + 4 * begin, rows[1], first_out)


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
    shares = record[_INPUTS] * record[_OUTPUTS] * (4 + record[_ROWS]) // _PART_BYTES
    most = max(_TILE_BYTES // (4 * record[_INPUTS]), 8)
    tiles = (record[_ROWS] + most - 1) // most
    # Of whole eights; items of one tile follow one another, so that it stays in the cache.
    record[_TILE] = ((record[_ROWS] + tiles - 1) // tiles + 7) // 8 * 8
    tiles = (record[_ROWS] + record[_TILE] - 1) // record[_TILE]
    record[_PARTS] = min(_PARTS_PER_THREAD * num_threads, record[_PANELS])
    num_items = tiles * record[_PARTS]
    if record[_INT8_X] != 0:
        round_rows(record[_X], record[_ROWS], record[_INPUTS], record[_INT8_X])
    record[_THREADS] = min(num_threads, num_items, 1 + shares)
    helpers = record[_THREADS] - 1
    address, error = share_out(frame, record, num_items, helpers, callback_of(_work))
    if address != 0:
        _work(address)
    elif error == 0:
        for index in range(num_items):
            _run_item(record, index)
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

    Its operands are `x float32[T, in]`, the weight, `float32[Q, in, W]` or `int32[Q, G, 8, W]`, its
    `scale float32[Q, G, W]` (of no element if it has none), and `threads int32[1]`. Its results are
    `float32[T, Q*W]`, and memory for x in int8, `int32[T, 10*G]`; of no element if x is not to be
    rounded.
    """
    handler = _handler_of(source_digest())
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return TARGET
