"""Pieces of memory, moved by a custom call of XLA for CPU, compiled by Numba: by several threads.

XLA would cut a layer out of packed blocks first, and then copy with one thread. And it moves
bfloat16 as float32: to write a row it would turn a whole cache into float32 and back.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from ..layout import NULL_BLOCK
from ..xla_ffi import ARGS, DATA, FRAME_WORDS, RETS, callback_of, copy_line, pointer_to
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

TARGET = "octavo.scatter_blocks"

# Words of the record of a call: addresses, sizes, and what is one item.
_CACHE, _IDS, _SOURCES, _BLOCKS, _COUNT, _WORDS, _STRIDE, _PER_ITEM = range(OWN, OWN + 8)
_RECORD_WORDS = OWN + 8

_LINE = 64
_ITEM_BYTES = 1 << 18  # some 20 microseconds


@compiled()
def _fill_record(record, frame):
    """Note all that the frame says; returns how many threads there are."""
    numbers = carray(pointer_to(buffer_of(frame[ARGS], 4)[DATA], types.int32), (4,))
    words = np.int64(numbers[2])
    record[_CACHE] = buffer_of(frame[RETS], 0)[DATA]
    record[_IDS] = buffer_of(frame[ARGS], 1)[DATA]
    record[_SOURCES] = buffer_of(frame[ARGS], 2)[DATA]
    record[_BLOCKS] = buffer_of(frame[ARGS], 3)[DATA] + 8 * words * numbers[0]
    record[_COUNT] = shape_of(frame[ARGS], 1, 1)[0]
    record[_WORDS], record[_STRIDE] = words, words * numbers[1]
    record[_PER_ITEM] = max(_ITEM_BYTES // (8 * words), 1)
    return np.int64(numbers[3])


@compiled()
def _run_item(record, index):
    """Copy some blocks."""
    words = record[_WORDS]
    ids = carray(pointer_to(record[_IDS], types.int32), (record[_COUNT],))
    sources = carray(pointer_to(record[_SOURCES], types.int32), (record[_COUNT],))
    first = index * record[_PER_ITEM]
    for i in range(first, min(first + record[_PER_ITEM], record[_COUNT])):
        block_id, source = np.int64(ids[i]), np.int64(sources[i])
        if block_id == NULL_BLOCK:
            continue
        old_address = record[_BLOCKS] + 8 * source * record[_STRIDE]
        new_address = record[_CACHE] + 8 * block_id * words
        old = carray(pointer_to(old_address, types.int64), (words,))
        new = carray(pointer_to(new_address, types.int64), (words,))
        if (old_address | new_address | 8 * words) % _LINE == 0:
            for place in range(0, 8 * words, _LINE):
                copy_line(new_address + place, old_address + place)
        else:
            for word in range(words):
                new[word] = old[word]


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
    num_items = (record[_COUNT] + record[_PER_ITEM] - 1) // record[_PER_ITEM]
    helpers = min(num_threads, num_items) - 1
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

    Its operands are an array of pieces, `ids int32[n]` of those to overwrite, 0 for none and else
    all different, `sources int32[n]`, an array of groups of pieces, and `(piece of a group, pieces
    in one, words of 8 bytes in a piece, threads) int32[4]`. Piece `ids[i]` becomes that piece of
    group `sources[i]`. Its result is the first array, in the operand's memory.
    """
    handler = _handler_of(source_digest())
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return TARGET
