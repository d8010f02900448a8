"""Attention of one query to a sequence, on a CPU with Numba: decode.

Contexts are cut into spans, where their own positions say; the spans of all sequences with one
query, side by side, make chunks, and when all are done, the spans of each sequence are merged, in
their order. So no bit depends on what else is computed, or by how many threads. Nothing is copied:
each block is read once, where it lies.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from ..xla_ffi import pointer_to, prefetch
from ..xla_threads import compiled
from .numba_record import (
    COUNT,
    IN_TILES,
    KV,
    ROW,
    SLOTS,
    SPAN_BLOCKS,
    SPANS,
    WINDOW,
    B,
    H,
    K,
    N,
    P,
    S,
    arrays_of,
    queries_of,
    scale_of,
)

_CACHE_LINE = 64
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


@compiled(fastmath=_FAST)
def _attend(q, kv, kv_address, table, begin, end, length, first, scale, work):
    """The softmax of one sequence's query over the blocks `table[begin:end]`."""
    scores, exponents, peak, total, acc = work
    (num_heads, head_size), (group, block_size) = q.shape, scores.shape
    row_len, num_kv_heads = kv.shape[2], num_heads // group
    block_bytes = num_kv_heads * block_size * row_len * 4
    for n in range(num_heads):
        peak[n], total[n] = _NONE, _ZERO
        for h in range(head_size):
            acc[n, h] = _ZERO
    for b in range(begin, end):
        block_id = table[b]
        next_block = kv_address + (table[b + 1] if b + 1 < end else block_id) * block_bytes
        last, skipped = min(block_size, length - b * block_size), max(0, first - b * block_size)
        for k in range(num_kv_heads):
            rows = kv[block_id * num_kv_heads + k]
            for t in range(block_size):
                line = next_block + (k * block_size + t) * row_len * 4
                for i in range(0, row_len * 4, _CACHE_LINE):
                    prefetch(line + i)
                row = rows[t]
                for g in range(group):
                    score = _ZERO
                    query = q[k * group + g]
                    for h in range(head_size):
                        score += query[h] * row[h]
                    scores[g, t] = score * scale
            for g in range(group):
                n = k * group + g
                for t in range(last, block_size):
                    scores[g, t] = _NONE
                for t in range(skipped):
                    scores[g, t] = _NONE
                highest = peak[n]
                for t in range(block_size):
                    highest = max(highest, scores[g, t])
                values = acc[n]
                if highest > peak[n]:
                    shrink = np.float32(math.exp(peak[n] - highest))
                    peak[n] = highest
                    total[n] *= shrink
                    for h in range(head_size):
                        values[h] *= shrink
                for t in range(block_size):
                    x = max((scores[g, t] - highest) * _LOG2_E, _SMALLEST)
                    whole = np.int32(x - _HALF)
                    x -= np.float32(whole)
                    power = ((((_C6 * x + _C5) * x + _C4) * x + _C3) * x + _C2) * x + _C1
                    scores[g, t] = power * x + _ONE
                    exponents[g, t] += whole << 23
                for t in range(last, block_size):
                    scores[g, t] = _ZERO
                for t in range(skipped):
                    scores[g, t] = _ZERO
                added = _ZERO
                for t in range(block_size):
                    added += scores[g, t]
                total[n] += added
                own = scores[g]
                for t in range(0, block_size, 4):
                    w0, w1, w2, w3 = own[t], own[t + 1], own[t + 2], own[t + 3]
                    v0, v1, v2, v3 = (
                        rows[t, head_size:],
                        rows[t + 1, head_size:],
                        rows[t + 2, head_size:],
                        rows[t + 3, head_size:],
                    )
                    for h in range(head_size):
                        values[h] += w0 * v0[h] + w1 * v1[h] + w2 * v2[h] + w3 * v3[h]


@compiled()
def _extent(record, s):
    """(row, context length, first position, first block, end of the blocks) of a decoding sequence.

    No blocks if it has none, or more than one query.
    """
    row, num_queries, length = queries_of(record, s)
    if num_queries != 1 or record[IN_TILES]:
        return 0, 0, 0, 0, 0
    first = max(0, length - record[WINDOW]) if record[WINDOW] > 0 else 0
    return row, length, first, first // record[B], (length + record[B] - 1) // record[B]


@compiled()
def count_blocks(record):
    """Blocks that are attended to by single queries."""
    count = 0
    for s in range(record[S]):
        _, _, _, begin, end = _extent(record, s)
        count += end - begin
    return count


@compiled()
def _slots_of(record):
    """Unmerged results, by sequence and span."""
    shape = (record[S], record[SPANS], record[N], record[H] + 2)
    return carray(pointer_to(record[SLOTS], types.float32), shape)


@compiled(fastmath=_FAST)
def run_chunk(record, index, chunks):
    """Attend to the spans that begin in one chunk of the blocks."""
    kv_shape = (record[P] * record[K], record[B], record[ROW])
    kv = carray(pointer_to(record[KV], types.float32), kv_shape)
    q, tables, out, lse = arrays_of(record)
    slots, scale, num_heads, head_size = _slots_of(record), scale_of(record), record[N], record[H]
    scores = np.empty((num_heads // record[K], record[B]), np.float32)
    peak, total = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    acc = np.empty((num_heads, head_size), np.float32)
    work = (scores, scores.view(np.int32), peak, total, acc)

    span_blocks, before = record[SPAN_BLOCKS], 0
    low, high = record[COUNT] * index // chunks, record[COUNT] * (index + 1) // chunks
    for s in range(record[S]):
        row, length, first, begin, end = _extent(record, s)
        if begin == end:
            continue
        whole = begin // span_blocks == (end - 1) // span_blocks
        for span in range(begin // span_blocks, (end - 1) // span_blocks + 1):
            own = max(begin, span * span_blocks), min(end, (span + 1) * span_blocks)
            is_mine = low <= before < high
            before += own[1] - own[0]
            if not is_mine:
                continue
            _attend(q[row], kv, record[KV], tables[s], *own, length, first, scale, work)
            for n in range(num_heads):
                if whole:
                    inverse = _ONE / total[n]
                    for h in range(head_size):
                        out[row, n, h] = acc[n, h] * inverse
                    lse[row, n] = peak[n] + np.float32(math.log(total[n]))
                else:
                    slot = slots[s, span, n]
                    for h in range(head_size):
                        slot[h] = acc[n, h]
                    slot[head_size], slot[head_size + 1] = peak[n], total[n]


@compiled(fastmath=_FAST)
def merge_spans(record):
    """Put together the spans of each sequence that has several."""
    _, _, out, lse = arrays_of(record)
    slots, head_size = _slots_of(record), record[H]
    for s in range(record[S]):
        row, _, _, begin, end = _extent(record, s)
        spans = range(begin // record[SPAN_BLOCKS], (end - 1) // record[SPAN_BLOCKS] + 1)
        if begin == end or len(spans) == 1:
            continue
        for n in range(record[N]):
            peak, total, values = _NONE, _ZERO, out[row, n]
            for span in spans:
                peak = max(peak, slots[s, span, n, head_size])
            for h in range(head_size):
                values[h] = _ZERO
            for span in spans:
                slot = slots[s, span, n]
                weight = np.float32(math.exp(slot[head_size] - peak))
                total += weight * slot[head_size + 1]
                for h in range(head_size):
                    values[h] += weight * slot[h]
            inverse = _ONE / total
            for h in range(head_size):
                values[h] *= inverse
            lse[row, n] = peak + np.float32(math.log(total))
