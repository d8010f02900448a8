"""Attention as a custom call of XLA for CPU, compiled by Numba: its threads, and who does what.

All tiles of queries (`numba_tiles`) and chunks of blocks (`numba_decode`) of a call are items that
threads take one after the other; whoever finishes last merges what decode has left in spans. If
no thread is free, the first one does it all.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import jax
import numpy as np
from numba import cfunc, types
from numba.np.numpy_support import carray

from ..xla_ffi import (
    API,
    CONTEXT,
    EXTENSION,
    FRAME_WORDS,
    FUTURE,
    FUTURE_CREATE,
    FUTURE_SET_AVAILABLE,
    METADATA,
    METADATA_TYPE,
    METADATA_VERSION,
    NEWEST_MINOR,
    OLDEST_MINOR,
    SCHEDULE,
    VERSION,
    allocate,
    atomic_add,
    call_address,
    callback_of,
    free,
    pointer_to,
)
from .numba_decode import count_blocks, merge_spans, run_chunk
from .numba_record import (
    CHUNKS,
    COUNT,
    FUTURE_ARGS,
    LEFT,
    NEXT,
    RECORD_WORDS,
    REFERENCES,
    ROW,
    SCHEDULE_ARGS,
    TILES,
    XLA_API,
    B,
    K,
    compiled,
    fill_record,
)
from .numba_tiles import count_tiles, run_tile

TARGET = "octavo.paged_attention"

# Below these a second thread costs more than it helps.
_CHUNK_BYTES, _TILE_OPERATIONS = 1 << 16, 1 << 21
_CHUNKS_PER_THREAD = 4


@compiled()
def _run_item(record, index):
    if index < record[TILES]:
        run_tile(record, index)
    else:
        run_chunk(record, index - record[TILES], record[CHUNKS])


@compiled()
def _work(address):
    """What every thread does: item after item; after the last one, tell XLA that all is there."""
    record = carray(pointer_to(address, types.int64), (RECORD_WORDS,))
    while True:
        index = atomic_add(address + 8 * NEXT, 1)
        if index >= record[TILES] + record[CHUNKS]:
            break
        _run_item(record, index)
        if atomic_add(address + 8 * LEFT, -1) == 1:
            merge_spans(record)
            api = carray(pointer_to(record[XLA_API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
            record[FUTURE_ARGS] = 24
            call_address(api[FUTURE_SET_AVAILABLE], address + 8 * FUTURE_ARGS)
    _let_go(address)


@compiled()
def _let_go(address):
    if atomic_add(address + 8 * REFERENCES, -1) == 1:
        free(address)


@compiled()
def _run(frame):
    """Serve a call; returns the address of XLA's error, 0 if there is none."""
    api = carray(pointer_to(frame[API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
    own = np.empty(RECORD_WORDS, np.int64)
    num_threads = fill_record(own, frame)
    if not OLDEST_MINOR <= (api[VERSION] >> 32) <= NEWEST_MINOR:
        num_threads = 1
    own[COUNT] = count_blocks(own)
    parts = own[COUNT] * own[K] * own[B] * own[ROW] * 4 // _CHUNK_BYTES
    own[CHUNKS] = min(_CHUNKS_PER_THREAD * num_threads, own[COUNT], 1 + parts)
    own[TILES], operations = count_tiles(own)
    parts += operations // _TILE_OPERATIONS
    helpers = min(num_threads, own[TILES] + own[CHUNKS], 1 + parts) - 1
    address = allocate(8 * RECORD_WORDS) if helpers > 0 else 0
    if address == 0:
        own[CHUNKS] = min(own[CHUNKS], 1)
        for index in range(own[TILES] + own[CHUNKS]):
            _run_item(own, index)
        merge_spans(own)
        return 0
    record = carray(pointer_to(address, types.int64), (RECORD_WORDS,))
    for i in range(RECORD_WORDS):
        record[i] = own[i]
    record[FUTURE_ARGS], record[FUTURE_ARGS + 1], record[FUTURE_ARGS + 2] = 24, 0, 0
    error = call_address(api[FUTURE_CREATE], address + 8 * FUTURE_ARGS)
    if error != 0:
        free(address)
        return error
    frame[FUTURE] = record[FUTURE_ARGS + 2]
    record[REFERENCES], record[NEXT] = 1 + helpers, 0
    record[LEFT] = record[TILES] + record[CHUNKS]
    record[SCHEDULE_ARGS], record[SCHEDULE_ARGS + 1] = 40, 0
    record[SCHEDULE_ARGS + 2] = frame[CONTEXT]
    record[SCHEDULE_ARGS + 3], record[SCHEDULE_ARGS + 4] = callback_of(_work), address
    for _ in range(helpers):
        if call_address(api[SCHEDULE], address + 8 * SCHEDULE_ARGS) != 0:
            _let_go(address)  # in its place
    _work(address)
    return 0


def _handler_of(digest: int):
    """The handler, compiled once for sources with this digest.

    Numba's cache looks at this file alone, and at what a function closes over.
    """

    @cfunc(types.int64(types.int64), cache=True)
    def handler(frame_address):
        frame = carray(pointer_to(frame_address, types.int64), (FRAME_WORDS,))
        if frame[EXTENSION] != 0:
            extension = carray(pointer_to(frame[EXTENSION], types.int64), (METADATA + 1,))
            if extension[1] & 0xFFFFFFFF == METADATA_TYPE:
                api = carray(pointer_to(frame[API], types.int64), (VERSION + 1,))
                metadata = pointer_to(extension[METADATA], types.int64)
                carray(metadata, (METADATA_VERSION + 1,))[METADATA_VERSION] = api[VERSION]
                return 0
        return _run(frame) if digest else 0

    return handler


@functools.cache
def register() -> str:
    """Make the custom call known to XLA; returns its name.

    Its operands are `q [T, N, H]`, `kv_cache [P, K, B, ROW]`, `block_tables int32[S, M]` (ids in
    use within `[0, P)`), `context_lens int32[S]`, `query_start int32[S+1]`, `scale float32[1]`,
    `(window, blocks of a span, threads, is causal, is batch-invariant) int32[5]` (0 for no
    window), `out [T, N, H]` and `lse [T, N]`, the last two aliased to its first two results, in
    which it fills the rows of all sequences. Its third result, `float32[S, spans, N, H + 2]`, is
    its notes.
    """
    here = Path(__file__).parent
    sources = sorted([*here.glob("numba_*.py"), *here.parent.glob("*.py")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()
    handler = _handler_of(int.from_bytes(digest[:7], "little") | 1)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return TARGET
