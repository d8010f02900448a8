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

from ..vectors import (
    add_product,
    add_products,
    larger,
    largest_of,
    load,
    power_of_two,
    splat,
    store,
    sum_of,
    sums_of_rows,
    widest,
)
from ..xla_ffi import pointer_to, prefetch_for_later
from ..xla_threads import address_of, compiled
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
    block_of,
    queries_of,
    scale_of,
)

_WIDEST = widest()
_CACHE_LINE = 64
_SPAN_TOKENS, _MOST_SPANS = 256, 64  # of a context
_CHUNK_TOKENS = 64
_LANES, _LINE = 16, 64  # of what scores are summed up in
_FAST = {"contract", "reassoc", "nsz", "arcp"}
_NONE = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOG2_E, _LN_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))


def blocks_of_span(block_size: int, table_len: int) -> int:
    """How many blocks are attended to at a time."""
    return max(1, _SPAN_TOKENS // block_size, -(-table_len // _MOST_SPANS))


def _attend_by(width: int, value_width: int):
    """What folds a chunk of keys into the softmax of one query of a KV head.

    It takes `width` numbers of a key, and `value_width` of a value, in one go.
    """

    @compiled()
    def scores_of(kv, table, blocks, k, sizes, ahead, query, parts):
        """Parts of the scores of a KV head's queries, a line for each key, queries apart."""
        num_kv_heads, group, block_size, row, head_size, part_bytes, pool = sizes
        none = splat(_ZERO, width)
        for b in range(blocks[0], blocks[1]):
            key = kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row
            following = _block_ahead(table, b, ahead, pool)
            fetched = kv + (following * num_kv_heads + k) * block_size * row
            for _ in range(0, block_size, 4):
                for i in range(0, 4 * row, _CACHE_LINE):
                    prefetch_for_later(fetched + i)
                fetched += 4 * row
                for g in range(group):
                    q, place = query + 4 * g * head_size, parts + g * part_bytes
                    s0, s1, s2, s3 = none, none, none, none
                    for h in range(0, 4 * head_size, 4 * width):
                        own, at = load(q + h, width), key + h
                        s0 = add_products(s0, own, load(at, width))
                        s1 = add_products(s1, own, load(at + row, width))
                        s2 = add_products(s2, own, load(at + 2 * row, width))
                        s3 = add_products(s3, own, load(at + 3 * row, width))
                    store(place, s0)
                    store(place + _LINE, s1)
                    store(place + 2 * _LINE, s2)
                    store(place + 3 * _LINE, s3)
                parts += 4 * _LINE
                key += 4 * row

    @compiled()
    def add_values(kv, table, blocks, k, sizes, seen, shrink, weights, acc):
        """Add the values of the keys `seen[0]` to `seen[1]`, what was there before shrunk."""
        num_kv_heads, _, block_size, row, head_size, _, pool = sizes
        first_block = blocks[0] * block_size
        for h in range(0, 4 * head_size, 4 * value_width):
            even = load(acc + h, value_width) * splat(shrink, value_width)
            odd = splat(_ZERO, value_width)
            for b in range(blocks[0], blocks[1]):
                before = b * block_size - first_block
                begin, end = max(0, seen[0] - before), min(block_size, seen[1] - before)
                value = kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row
                value += begin * row + 4 * head_size + h
                weight = weights + 4 * (before + begin)
                for _ in range((end - begin) // 2):
                    even = add_product(even, weight, load(value, value_width))
                    odd = add_product(odd, weight + 4, load(value + row, value_width))
                    value += 2 * row
                    weight += 8
                if (end - begin) % 2 == 1:
                    even = add_product(even, weight, load(value, value_width))
            store(acc + h, even + odd)

    @compiled()
    def attend(kv, table, begin, end, length, first, sizes, ahead, work):
        """The softmax of one sequence's query over the blocks `table[begin:end]`."""
        num_kv_heads, group, block_size, _, head_size, part_bytes, _ = sizes
        query, parts, scores, acc, peak, total, own = work
        chunk = max(1, _CHUNK_TOKENS // block_size)
        for low in range(begin, end, chunk):
            blocks = low, min(low + chunk, end)
            num_keys = (blocks[1] - low) * block_size
            lines = (num_keys + _LANES - 1) // _LANES * _LANES
            seen = max(0, first - low * block_size), min(num_keys, length - low * block_size)
            for k in range(num_kv_heads):
                queries = query + 4 * k * group * head_size
                scores_of(kv, table, blocks, k, sizes, ahead, queries, parts)
                for g in range(group):
                    n = k * group + g
                    for t in range(0, lines, _LANES):
                        store(scores + 4 * t, sums_of_rows(parts + g * part_bytes + t * _LINE))
                    own[: seen[0]] = _NONE
                    own[seen[1] : lines] = _NONE
                    highest = load(scores, _LANES)
                    for t in range(_LANES, lines, _LANES):
                        highest = larger(load(scores + 4 * t, _LANES), highest)
                    before, top = peak[n], max(peak[n], largest_of(highest))
                    highest, added = splat(top, _LANES), splat(_ZERO, _LANES)
                    for t in range(0, lines, _LANES):
                        weight = power_of_two(load(scores + 4 * t, _LANES) - highest)
                        store(scores + 4 * t, weight)
                        added = added + weight
                    shrink = largest_of(power_of_two(splat(before - top, _LANES)))
                    peak[n], total[n] = top, total[n] * shrink + sum_of(added)
                    place = acc + 4 * n * head_size
                    add_values(kv, table, blocks, k, sizes, seen, shrink, scores, place)

    return attend


@compiled()
def _block_ahead(table, b, ahead, pool):
    """The block that is read some blocks after `table[b]`: of the sequence, or of the next one."""
    distance, end, following, begin, count = ahead
    if b + distance < end:
        return block_of(table, b + distance, pool)
    later = b + distance - end
    if later < count:
        return block_of(following, begin + later, pool)
    return block_of(table, b, pool)


_attend_narrow = _attend_by(4, 4)
_attend_lanes = _attend_by(_LANES, _LANES)
_attend_wide = _attend_by(_LANES, max(_LANES, _WIDEST))


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


@compiled()
def run_chunk(record, index, chunks):
    """Attend to the spans that begin in one chunk of the blocks."""
    q, tables, out, lse = arrays_of(record)
    num_heads, head_size, block_size = record[N], record[H], record[B]
    group, factor = num_heads // record[K], scale_of(record) * _LOG2_E
    lines = (max(_CHUNK_TOKENS, block_size) + _LANES - 1) // _LANES * _LANES
    # Of narrow parts of scores, what is beside them in their lines stays zero.
    memory = np.zeros(_LANES * (group + 1) * lines + 2 * num_heads * head_size + _LANES, np.float32)
    offset = -(address_of(memory) // 4) % _LANES
    parts_size = _LANES * group * lines
    own = memory[offset + parts_size : offset + parts_size + lines]
    rest = memory[offset + parts_size + lines :]
    query = rest[: num_heads * head_size].reshape(num_heads, head_size)
    acc = rest[num_heads * head_size :][: num_heads * head_size].reshape(num_heads, head_size)
    peak, total = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    parts = address_of(memory) + 4 * offset
    scores = parts + 4 * parts_size
    queries = scores + 4 * lines
    work = (queries, parts, scores, queries + 4 * query.size, peak, total, own)
    sizes = (record[K], group, block_size, 4 * record[ROW], head_size, _LINE * lines, record[P])

    slots, span_blocks, before = _slots_of(record), record[SPAN_BLOCKS], 0
    low, high = record[COUNT] * index // chunks, record[COUNT] * (index + 1) // chunks
    for s in range(record[S]):
        row, length, first, begin, end = _extent(record, s)
        if begin == end:
            continue
        following = min(s + 1, record[S] - 1)
        _, _, _, next_begin, next_end = _extent(record, following)
        distance = 2
        ahead = (distance, end, tables[following], next_begin, next_end - next_begin)
        whole = begin // span_blocks == (end - 1) // span_blocks
        for span in range(begin // span_blocks, (end - 1) // span_blocks + 1):
            blocks = max(begin, span * span_blocks), min(end, (span + 1) * span_blocks)
            is_mine = low <= before < high
            before += blocks[1] - blocks[0]
            if not is_mine:
                continue
            for n in range(num_heads):
                peak[n], total[n] = _NONE, _ZERO
                for h in range(head_size):
                    acc[n, h], query[n, h] = _ZERO, q[row, n, h] * factor
            args = (record[KV], tables[s], *blocks, length, first, sizes, ahead, work)
            if head_size % _WIDEST == 0:
                _attend_wide(*args)
            elif head_size % _LANES == 0:
                _attend_lanes(*args)
            else:
                _attend_narrow(*args)
            for n in range(num_heads):
                if whole:
                    inverse = _ONE / total[n]
                    for h in range(head_size):
                        out[row, n, h] = acc[n, h] * inverse
                    lse[row, n] = (peak[n] + np.float32(math.log2(total[n]))) * _LN_2
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
                weight = np.float32(2.0 ** (slot[head_size] - peak))
                total += weight * slot[head_size + 1]
                for h in range(head_size):
                    values[h] += weight * slot[h]
            inverse = _ONE / total
            for h in range(head_size):
                values[h] *= inverse
            lse[row, n] = (peak + np.float32(math.log2(total))) * _LN_2
