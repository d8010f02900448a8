"""Decode attention as a custom call of XLA for CPU, compiled by Numba.

Contexts are cut into spans, where their own positions say; the spans of all sequences with one
query, side by side, make chunks that threads take one after the other, and whoever finishes last
merges the spans of each sequence, in their order. So no bit depends on what else is computed, or
by how many threads; and if none is free, the first one does it all.
Nothing is copied: each block is read once, where it lies.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from numba import cfunc, njit, types
from numba.np.numpy_support import carray

from ..xla_ffi import (
    API,
    ARGS,
    CONTEXT,
    DATA,
    DIMS,
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
    RETS,
    SCHEDULE,
    VERSION,
    allocate,
    atomic_add,
    call_address,
    callback_of,
    free,
    pointer_to,
    prefetch,
)

TARGET = "octavo.paged_decode"

# Below this a second thread costs more than it helps.
_CHUNK_BYTES = 1 << 16
_CHUNKS_PER_THREAD = 4
_CACHE_LINE = 64

# Words of the record of a call, which threads share until the last one lets go of it: addresses,
# sizes, who is how far, and the arguments of functions of XLA.
_Q, _KV, _TABLES, _LENS, _STARTS, _SCALE, _OUT, _LSE, _SLOTS, _API = range(10)
_T, _N, _H, _P, _K, _B, _ROW, _S, _M, _SPANS = range(10, 20)
_WINDOW, _SPAN_BLOCKS, _COUNT, _CHUNKS = range(20, 24)
_REFERENCES, _NEXT, _LEFT = range(24, 27)
_FUTURE_ARGS, _SCHEDULE_ARGS, _RECORD_WORDS = 32, 40, 48

_SPAN_TOKENS, _MOST_SPANS = 256, 64  # of a context

_FAST = {"contract", "reassoc", "nsz", "arcp"}
_NONE = np.float32(-np.inf)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
# 2**x for x in [-1/2, 1/2]: the Taylor series of exp(x ln 2), to 2e-7 of the value.
_LOG2_E, _SMALLEST = np.float32(1 / math.log(2)), np.float32(-126)
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2) ** n / math.factorial(n)) for n in (1, 2, 3, 4, 5, 6)
)


def blocks_of_span(block_size: int, table_len: int) -> int:
    """How many blocks are attended to at a time."""
    return max(1, _SPAN_TOKENS // block_size, -(-table_len // _MOST_SPANS))


_compiled = functools.partial(njit, nogil=True, error_model="numpy", cache=True)


@_compiled(fastmath=_FAST)
def _attend(q, kv, kv_address, table, begin, end, length, first, scale, work):
    """The softmax of one sequence's query over the blocks `table[begin:end]`."""
    scores, exponents, peak, total, acc = work
    (num_heads, H), (G, B), ROW = q.shape, scores.shape, kv.shape[2]
    K = num_heads // G
    block_bytes = K * B * ROW * 4
    for n in range(num_heads):
        peak[n], total[n] = _NONE, _ZERO
        for h in range(H):
            acc[n, h] = _ZERO
    for b in range(begin, end):
        block_id = table[b]
        next_block = kv_address + (table[b + 1] if b + 1 < end else block_id) * block_bytes
        last, skipped = min(B, length - b * B), max(0, first - b * B)
        for k in range(K):
            rows = kv[block_id * K + k]
            for t in range(B):
                line = next_block + (k * B + t) * ROW * 4
                for i in range(0, ROW * 4, _CACHE_LINE):
                    prefetch(line + i)
                row = rows[t]
                for g in range(G):
                    score = _ZERO
                    query = q[k * G + g]
                    for h in range(H):
                        score += query[h] * row[h]
                    scores[g, t] = score * scale
            for g in range(G):
                n = k * G + g
                for t in range(last, B):
                    scores[g, t] = _NONE
                for t in range(skipped):
                    scores[g, t] = _NONE
                highest = peak[n]
                for t in range(B):
                    highest = max(highest, scores[g, t])
                values = acc[n]
                if highest > peak[n]:
                    shrink = np.float32(math.exp(peak[n] - highest))
                    peak[n] = highest
                    total[n] *= shrink
                    for h in range(H):
                        values[h] *= shrink
                for t in range(B):
                    x = max((scores[g, t] - highest) * _LOG2_E, _SMALLEST)
                    whole = np.int32(x - _HALF)
                    x -= np.float32(whole)
                    power = ((((_C6 * x + _C5) * x + _C4) * x + _C3) * x + _C2) * x + _C1
                    scores[g, t] = power * x + _ONE
                    exponents[g, t] += whole << 23
                for t in range(last, B):
                    scores[g, t] = _ZERO
                for t in range(skipped):
                    scores[g, t] = _ZERO
                added = _ZERO
                for t in range(B):
                    added += scores[g, t]
                total[n] += added
                own = scores[g]
                for t in range(0, B, 4):
                    w0, w1, w2, w3 = own[t], own[t + 1], own[t + 2], own[t + 3]
                    v0, v1, v2, v3 = rows[t, H:], rows[t + 1, H:], rows[t + 2, H:], rows[t + 3, H:]
                    for h in range(H):
                        values[h] += w0 * v0[h] + w1 * v1[h] + w2 * v2[h] + w3 * v3[h]


@_compiled()
def _buffer(list_address, index):
    """The words of an operand or result."""
    addresses = carray(pointer_to(list_address, types.int64), (index + 1,))
    return carray(pointer_to(addresses[index], types.int64), (DIMS + 1,))


@_compiled()
def _extent(record, s):
    """(first position, first block, end of the blocks) that sequence s's one query sees."""
    lens = carray(pointer_to(record[_LENS], types.int32), (record[_S],))
    starts = carray(pointer_to(record[_STARTS], types.int32), (record[_S] + 1,))
    if starts[s + 1] - starts[s] != 1:
        return 0, 0, 0
    first = max(0, lens[s] - record[_WINDOW]) if record[_WINDOW] > 0 else 0
    begin, end = first // record[_B], (lens[s] + record[_B] - 1) // record[_B]
    # Lists that do not fit together are an error, but nothing to read or write elsewhere for.
    if begin >= end or end > record[_M] or starts[s] < 0 or starts[s] >= record[_T]:
        return 0, 0, 0
    return first, begin, end


@_compiled()
def _fill_record(record, frame):
    """Note all that the frame says: XLA may use it for another call before this one is over."""
    for at, index in ((_Q, 0), (_KV, 1), (_TABLES, 2), (_LENS, 3), (_STARTS, 4), (_SCALE, 5)):
        record[at] = _buffer(frame[ARGS], index)[DATA]
    for at, index in ((_OUT, 0), (_LSE, 1), (_SLOTS, 2)):
        record[at] = _buffer(frame[RETS], index)[DATA]
    q = carray(pointer_to(_buffer(frame[ARGS], 0)[DIMS], types.int64), (3,))
    kv = carray(pointer_to(_buffer(frame[ARGS], 1)[DIMS], types.int64), (4,))
    tables = carray(pointer_to(_buffer(frame[ARGS], 2)[DIMS], types.int64), (2,))
    slots = carray(pointer_to(_buffer(frame[RETS], 2)[DIMS], types.int64), (2,))
    numbers = carray(pointer_to(_buffer(frame[ARGS], 6)[DATA], types.int32), (3,))
    record[_T], record[_N], record[_H] = q[0], q[1], q[2]
    record[_P], record[_K], record[_B], record[_ROW] = kv[0], kv[1], kv[2], kv[3]
    record[_S], record[_M], record[_SPANS] = tables[0], tables[1], slots[1]
    record[_WINDOW], record[_SPAN_BLOCKS] = numbers[0], numbers[1]
    record[_API], record[_COUNT] = frame[API], 0
    for s in range(record[_S]):
        _, begin, end = _extent(record, s)
        record[_COUNT] += end - begin
    return np.int64(numbers[2])


@_compiled()
def _results(record):
    """(out, lse, slots), the slots by sequence and span."""
    T, N, H = record[_T], record[_N], record[_H]
    slots = (record[_S], record[_SPANS], N, H + 2)
    return (
        carray(pointer_to(record[_OUT], types.float32), (T, N, H)),
        carray(pointer_to(record[_LSE], types.float32), (T, N)),
        carray(pointer_to(record[_SLOTS], types.float32), slots),
    )


@_compiled(fastmath=_FAST)
def _run_chunk(record, index, chunks):
    """Attend to the spans that begin in one chunk of the blocks."""
    N, H, K, B = record[_N], record[_H], record[_K], record[_B]
    q = carray(pointer_to(record[_Q], types.float32), (record[_T], N, H))
    kv = carray(pointer_to(record[_KV], types.float32), (record[_P] * K, B, record[_ROW]))
    tables = carray(pointer_to(record[_TABLES], types.int32), (record[_S], record[_M]))
    lens = carray(pointer_to(record[_LENS], types.int32), (record[_S],))
    starts = carray(pointer_to(record[_STARTS], types.int32), (record[_S] + 1,))
    scale = carray(pointer_to(record[_SCALE], types.float32), (1,))[0]
    out, lse, slots = _results(record)
    scores = np.empty((N // K, B), np.float32)
    peak, total = np.empty(N, np.float32), np.empty(N, np.float32)
    acc = np.empty((N, H), np.float32)
    work = (scores, scores.view(np.int32), peak, total, acc)

    span_blocks, before = record[_SPAN_BLOCKS], 0
    low, high = record[_COUNT] * index // chunks, record[_COUNT] * (index + 1) // chunks
    for s in range(record[_S]):
        first, begin, end = _extent(record, s)
        if begin == end:
            continue
        row, whole = starts[s], begin // span_blocks == (end - 1) // span_blocks
        for span in range(begin // span_blocks, (end - 1) // span_blocks + 1):
            own = max(begin, span * span_blocks), min(end, (span + 1) * span_blocks)
            is_mine = low <= before < high
            before += own[1] - own[0]
            if not is_mine:
                continue
            _attend(q[row], kv, record[_KV], tables[s], *own, lens[s], first, scale, work)
            for n in range(N):
                if whole:
                    inverse = _ONE / total[n]
                    for h in range(H):
                        out[row, n, h] = acc[n, h] * inverse
                    lse[row, n] = peak[n] + np.float32(math.log(total[n]))
                else:
                    slot = slots[s, span, n]
                    for h in range(H):
                        slot[h] = acc[n, h]
                    slot[H], slot[H + 1] = peak[n], total[n]


@_compiled(fastmath=_FAST)
def _merge(record):
    """Put together the spans of each sequence that has several."""
    starts = carray(pointer_to(record[_STARTS], types.int32), (record[_S] + 1,))
    out, lse, slots = _results(record)
    H = record[_H]
    for s in range(record[_S]):
        _, begin, end = _extent(record, s)
        spans = range(begin // record[_SPAN_BLOCKS], (end - 1) // record[_SPAN_BLOCKS] + 1)
        if begin == end or len(spans) == 1:
            continue
        row = starts[s]
        for n in range(record[_N]):
            peak, total, values = _NONE, _ZERO, out[row, n]
            for span in spans:
                peak = max(peak, slots[s, span, n, H])
            for h in range(H):
                values[h] = _ZERO
            for span in spans:
                slot = slots[s, span, n]
                weight = np.float32(math.exp(slot[H] - peak))
                total += weight * slot[H + 1]
                for h in range(H):
                    values[h] += weight * slot[h]
            inverse = _ONE / total
            for h in range(H):
                values[h] *= inverse
            lse[row, n] = peak + np.float32(math.log(total))


@_compiled()
def _work(address):
    """What every thread does: chunk after chunk; after the last one, tell XLA that all is there."""
    record = carray(pointer_to(address, types.int64), (_RECORD_WORDS,))
    while True:
        index = atomic_add(address + 8 * _NEXT, 1)
        if index >= record[_CHUNKS]:
            break
        _run_chunk(record, index, record[_CHUNKS])
        if atomic_add(address + 8 * _LEFT, -1) == 1:
            _merge(record)
            api = carray(pointer_to(record[_API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
            record[_FUTURE_ARGS] = 24
            call_address(api[FUTURE_SET_AVAILABLE], address + 8 * _FUTURE_ARGS)
    _let_go(address)


@_compiled()
def _let_go(address):
    if atomic_add(address + 8 * _REFERENCES, -1) == 1:
        free(address)


@cfunc(types.int64(types.int64), cache=True)
def _handler(frame_address):
    frame = carray(pointer_to(frame_address, types.int64), (FRAME_WORDS,))
    api = carray(pointer_to(frame[API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
    if frame[EXTENSION] != 0:
        extension = carray(pointer_to(frame[EXTENSION], types.int64), (METADATA + 1,))
        if extension[1] & 0xFFFFFFFF == METADATA_TYPE:
            metadata = pointer_to(extension[METADATA], types.int64)
            carray(metadata, (METADATA_VERSION + 1,))[METADATA_VERSION] = api[VERSION]
            return 0
    own = np.empty(_RECORD_WORDS, np.int64)
    num_threads = _fill_record(own, frame)
    if not OLDEST_MINOR <= (api[VERSION] >> 32) <= NEWEST_MINOR:
        num_threads = 1
    num_bytes = own[_COUNT] * own[_K] * own[_B] * own[_ROW] * 4
    chunks = min(_CHUNKS_PER_THREAD * num_threads, 1 + num_bytes // _CHUNK_BYTES)
    address = allocate(8 * _RECORD_WORDS) if num_threads > 1 and chunks > 1 else 0
    if address == 0:
        _run_chunk(own, 0, 1)
        _merge(own)
        return 0
    record = carray(pointer_to(address, types.int64), (_RECORD_WORDS,))
    for i in range(_RECORD_WORDS):
        record[i] = own[i]
    record[_FUTURE_ARGS], record[_FUTURE_ARGS + 1], record[_FUTURE_ARGS + 2] = 24, 0, 0
    error = call_address(api[FUTURE_CREATE], address + 8 * _FUTURE_ARGS)
    if error != 0:
        free(address)
        return error
    frame[FUTURE] = record[_FUTURE_ARGS + 2]
    helpers = min(num_threads, chunks) - 1
    record[_REFERENCES], record[_NEXT], record[_LEFT] = 1 + helpers, 0, chunks
    record[_CHUNKS] = chunks
    record[_SCHEDULE_ARGS], record[_SCHEDULE_ARGS + 1] = 40, 0
    record[_SCHEDULE_ARGS + 2] = frame[CONTEXT]
    record[_SCHEDULE_ARGS + 3], record[_SCHEDULE_ARGS + 4] = callback_of(_work), address
    for _ in range(helpers):
        if call_address(api[SCHEDULE], address + 8 * _SCHEDULE_ARGS) != 0:
            _let_go(address)  # in its place
    _work(address)
    return 0


@functools.cache
def register() -> str:
    """Make the custom call known to XLA; returns its name.

    Its operands are `q [T, N, H]`, `kv_cache [P, K, B, ROW]`, `block_tables int32[S, M]` (ids in
    use within `[0, P)`), `context_lens int32[S]`, `query_start int32[S+1]`, `scale float32[1]`,
    `(window, blocks of a span, threads) int32[3]` (0 for no window), `out [T, N, H]` and
    `lse [T, N]`, the last two aliased to its first two results, in which it fills the rows of
    sequences with one query. Its third result, `float32[S, spans, N, H + 2]`, is its notes.
    """
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler.ctypes), platform="cpu")
    return TARGET
