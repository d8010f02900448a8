"""Attention as a custom call of XLA for CPU, compiled by Numba: its threads, and who does what.

All tiles of queries (`numba_tiles`) and chunks of blocks (`numba_decode`) of a call are items that
threads take one after the other; whoever finishes last merges what decode has left in spans. If
no thread is free, the first one does it all.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from ..xla_ffi import FRAME_WORDS, callback_of, pointer_to
from ..xla_threads import (
    answer_question,
    compiled_for,
    is_last,
    let_go,
    next_item,
    share_out,
    source_digest,
    tell_xla,
    threads_of,
)
from .numba_decode import chunks_of, count_blocks, merge_spans
from .numba_numbers import BFLOAT16, FLOAT32, Numbers
from .numba_record import (
    CHUNKS,
    COUNT,
    RECORD_WORDS,
    ROW,
    TILES,
    B,
    K,
    clear_rest,
    fill_record,
)
from .numba_tiles import count_tiles, tiles_of

TARGET = "octavo.paged_attention"

# Below these a second thread costs more than it helps.
_CHUNK_BYTES, _TILE_OPERATIONS = 1 << 16, 1 << 21
_CHUNKS_PER_THREAD = 4


def _run_with(numbers: Numbers):
    """What serves a call whose cache has these numbers."""
    run_tile, run_chunk = tiles_of(numbers), chunks_of(numbers)

    @compiled_for(numbers.name)
    def run_item(record, index):
        if index < record[TILES]:
            run_tile(record, index)
        else:
            run_chunk(record, index - record[TILES], record[CHUNKS])

    @compiled_for(numbers.name)
    def work(address):
        """What every thread does."""
        record = carray(pointer_to(address, types.int64), (RECORD_WORDS,))
        while True:
            index = next_item(address)
            if index < 0:
                break
            run_item(record, index)
            if is_last(address):
                merge_spans(record)
                tell_xla(address)
        let_go(address)

    @compiled_for(numbers.name)
    def run(frame):
        """Serve a call; returns the address of XLA's error, 0 if there is none."""
        record = np.empty(RECORD_WORDS, np.int64)
        num_threads = threads_of(frame, fill_record(record, frame))
        clear_rest(record)
        record[COUNT] = count_blocks(record)
        parts = record[COUNT] * record[K] * record[B] * record[ROW] * 4 // _CHUNK_BYTES
        record[CHUNKS] = min(_CHUNKS_PER_THREAD * num_threads, record[COUNT], 1 + parts)
        record[TILES], operations = count_tiles(record)
        num_items, parts = record[TILES] + record[CHUNKS], parts + operations // _TILE_OPERATIONS
        helpers = min(num_threads, num_items, 1 + parts) - 1
        address, error = share_out(frame, record, num_items, helpers, callback_of(work))
        if address != 0:
            work(address)
        elif error == 0:
            record[CHUNKS] = min(record[CHUNKS], 1)
            for index in range(record[TILES] + record[CHUNKS]):
                run_item(record, index)
            merge_spans(record)
        return error

    return run


_run_float32, _run_bfloat16 = _run_with(FLOAT32), _run_with(BFLOAT16)


# Each is compiled when it is first asked for. They are two, as Numba's cache would not find again
# what closes over a compiled function.
def _float32_handler(digest: int):
    @cfunc(types.int64(types.int64), cache=True)
    def handler(frame_address):
        frame = carray(pointer_to(frame_address, types.int64), (FRAME_WORDS,))
        return 0 if answer_question(frame) or digest < 0 else _run_float32(frame)

    return handler


def _bfloat16_handler(digest: int):
    @cfunc(types.int64(types.int64), cache=True)
    def handler(frame_address):
        frame = carray(pointer_to(frame_address, types.int64), (FRAME_WORDS,))
        return 0 if answer_question(frame) or digest < 0 else _run_bfloat16(frame)

    return handler


_HANDLERS = {"float32": _float32_handler, "bfloat16": _bfloat16_handler}


@functools.cache
def register(dtype: str = "float32") -> str:
    """Make the custom call for caches of a dtype known to XLA; returns its name.

    Its operands are `q [T, N, H]`, `kv_cache [P, K, B, ROW]`, `block_tables int32[S, M]`,
    `context_lens int32[S]`, `query_start int32[S+1]`, `scale float32[1]`, `(window, blocks of a
    span, threads, is causal) int32[4]` (0 for no window), and the lists of `SharedPrefixes`, of no
    element if there are none; with them, sequence s has the one query s. Its results are
    `out [T, N, H]`, `lse [T, N]`, and `float32[S, spans, N, H + 2]` for its notes.
    """
    handler = _HANDLERS[dtype](source_digest())
    target = f"{TARGET}_{dtype}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return target
