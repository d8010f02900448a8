"""Attention of one query to a sequence, on a CPU with Numba: decode.

Contexts are cut into spans, where their own positions say; the spans of all sequences with one
query, side by side, make chunks, and when all are done, the spans of each sequence are merged, in
their order. So no bit depends on what else is computed, or by how many threads; and every number is
summed up as tiles do (`numba_tiles`), so that a token found has the bits of one computed. Each
block is read once, where it lies.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from ..vectors import (
    add_products,
    larger,
    largest_of,
    load,
    power_of_two,
    splat,
    store,
    sum_of,
    transpose_square,
    widest,
)
from ..xla_ffi import pointer_to, prefetch_for_later
from ..xla_threads import address_of, compiled, compiled_for
from .numba_numbers import Numbers
from .numba_record import (
    COUNT,
    KV,
    OUT,
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
    shared_spans,
    slots_of,
)
from .numba_tiles import CHUNK_TOKENS, LANES

_WIDEST = widest()
_CACHE_LINE = 64
_SPAN_TOKENS, _MOST_SPANS = 256, 64  # of a context
_SQUARE = min(16, _WIDEST // 2)
_NONE = np.float32(-np.inf)
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOG2_E, _LN_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))


def blocks_of_span(block_size: int, table_len: int) -> int:
    """How many blocks are attended to at a time."""
    chunk_blocks = max(1, CHUNK_TOKENS // block_size)
    blocks = max(1, _SPAN_TOKENS // block_size, -(-table_len // _MOST_SPANS))
    return -(-blocks // chunk_blocks) * chunk_blocks


@compiled()
def _turn_keys(kv, table, blocks, k, sizes, ahead, lines, turned):
    """Write a chunk's keys of a KV head by columns, a line for each of their words."""
    num_kv_heads, _, block_size, row, _, words, pool = sizes
    is_square = block_size % _SQUARE == 0 and words % _SQUARE == 0
    columns = carray(pointer_to(turned, types.float32), (words, lines))
    place = 0
    for b in range(blocks[0], blocks[1]):
        key = kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row
        following = _block_ahead(table, b, ahead, pool)
        fetched = kv + (following * num_kv_heads + k) * block_size * row
        if is_square:
            part = _SQUARE * row // (words // _SQUARE)
            for t in range(0, block_size, _SQUARE):
                for h in range(0, words, _SQUARE):
                    for i in range(0, part, _CACHE_LINE):
                        prefetch_for_later(fetched + i)
                    fetched += part
                    source, target = key + t * row + 4 * h, turned + 4 * (h * lines + place + t)
                    transpose_square(source, row, target, 4 * lines, _SQUARE)
        else:
            numbers = carray(pointer_to(key, types.float32), (block_size, row // 4))
            for h in range(words):
                for t in range(block_size):
                    columns[h, place + t] = numbers[t, h]
        place += block_size


def _score_by(numbers: Numbers):
    """What computes a query's scores of a chunk's keys; each summed up in order, as in tiles."""
    add_word = numbers.add_word

    @compiled_for(numbers.name)
    def score(turned, query, words, lines, scores):
        t = 0
        while t + _WIDEST <= lines:
            total, column = splat(_ZERO, _WIDEST), turned + 4 * t
            for h in range(words):
                total = add_word(total, query + 4 * h, load(column, _WIDEST))
                column += 4 * lines
            store(scores + 4 * t, total)
            t += _WIDEST
        while t < lines:
            total, column = splat(_ZERO, LANES), turned + 4 * t
            for h in range(words):
                total = add_word(total, query + 4 * h, load(column, LANES))
                column += 4 * lines
            store(scores + 4 * t, total)
            t += LANES

    return score


def _attend_by(value_width: int, numbers: Numbers, score):
    """What folds a chunk of keys into the softmax of one query of a KV head.

    It takes `value_width` numbers of a value in one go.
    """
    per_word, add_word, pack = numbers.per_word, numbers.add_word, numbers.pack
    load_values = numbers.load_values_by(value_width)

    @compiled_for(value_width, numbers.name)
    def add_values(kv, table, blocks, k, sizes, seen, shrink, weights, acc):
        """Add the values of the keys `seen[0]` to `seen[1]`, what was there before shrunk."""
        num_kv_heads, _, block_size, row, head_size, _, pool = sizes
        first_block, size = blocks[0] * block_size, 4 // per_word
        for h in range(0, head_size, value_width):
            total = load(acc + 4 * h, value_width) * splat(shrink, value_width)
            for b in range(blocks[0], blocks[1]):
                before = b * block_size - first_block
                begin, end = max(0, seen[0] - before), min(block_size, seen[1] - before)
                begin -= begin % per_word
                value = kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row
                value += begin * row + (head_size + h) * size
                weight = weights + size * (before + begin)
                for _ in range(begin, end, per_word):
                    total = add_word(total, weight, load_values(value, row))
                    value += per_word * row
                    weight += 4
            store(acc + 4 * h, total)

    @compiled_for(value_width, numbers.name)
    def attend(kv, table, begin, end, length, first, sizes, ahead, work):
        """The softmax of one sequence's query over the blocks `table[begin:end]`."""
        num_kv_heads, group, block_size, _, head_size, words, _ = sizes
        query, turned, scores, acc, peak, total, own = work
        chunk = max(1, CHUNK_TOKENS // block_size)
        for low in range(begin // chunk * chunk, end, chunk):
            blocks = low, min(low + chunk, end)
            num_keys = (blocks[1] - low) * block_size
            lines = (num_keys + LANES - 1) // LANES * LANES
            seen = max(0, first - low * block_size), min(num_keys, length - low * block_size)
            for k in range(num_kv_heads):
                _turn_keys(kv, table, blocks, k, sizes, ahead, lines, turned)
                for n in range(k * group, (k + 1) * group):
                    score(turned, query + 4 * n * head_size, words, lines, scores)
                    own[: seen[0]] = _NONE
                    own[seen[1] : lines] = _NONE
                    highest = load(scores, LANES)
                    for t in range(LANES, lines, LANES):
                        highest = larger(load(scores + 4 * t, LANES), highest)
                    before, top = peak[n], max(peak[n], largest_of(highest))
                    highest, added = splat(top, LANES), splat(_ZERO, LANES)
                    for t in range(0, lines, LANES):
                        weight = power_of_two(load(scores + 4 * t, LANES) - highest)
                        store(scores + 4 * t, weight)
                        added = added + weight
                    shrink = _power(before - top)
                    peak[n], total[n] = top, _fused(total[n], shrink, sum_of(added))
                    pack(scores, lines)
                    place = acc + 4 * n * head_size
                    add_values(kv, table, blocks, k, sizes, seen, shrink, scores, place)

    return attend


@compiled()
def _power(exponent):
    return largest_of(power_of_two(splat(exponent, LANES)))


@compiled()
def _fused(a, b, c):
    """a * b + c, rounded once."""
    return largest_of(add_products(splat(c, LANES), splat(a, LANES), splat(b, LANES)))


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


@compiled()
def _extent(record, s):
    """(row, context length, first position, first block, end of the blocks) of a decoding sequence.

    Without the spans that a group attends to. No blocks if it has none, or more than one query.
    """
    row, num_queries, length = queries_of(record, s)
    if num_queries != 1:
        return 0, 0, 0, 0, 0
    first = max(0, length - record[WINDOW]) if record[WINDOW] > 0 else 0
    begin = max(first // record[B], shared_spans(record, s) * record[SPAN_BLOCKS])
    end = (length + record[B] - 1) // record[B]
    return row, length, first, min(begin, end), end


@compiled()
def count_blocks(record):
    """Blocks that are attended to by single queries."""
    count = 0
    for s in range(record[S]):
        _, _, _, begin, end = _extent(record, s)
        count += end - begin
    return count


def _fold_by(width: int):
    """What folds a span's values into those of the spans before it."""

    @compiled_for(width)
    def fold(place, shrink, own, factor, size):
        for h in range(0, 4 * size, 4 * width):
            added = load(place + h, width) * splat(shrink, width)
            store(place + h, add_products(added, load(own + h, width), splat(factor, width)))

    return fold


_fold_narrow, _fold_lanes = _fold_by(4), _fold_by(LANES)


@compiled()
def merge_spans(record):
    """Put together the spans of each sequence that has several, in their order, as tiles do.

    What a group's tile has left of the shared ones is the first.
    """
    _, _, out, lse = arrays_of(record)
    slots, head_size = slots_of(record), record[H]
    for s in range(record[S]):
        row, _, _, begin, end = _extent(record, s)
        shared = shared_spans(record, s)
        first = shared - 1 if shared > 0 else begin // record[SPAN_BLOCKS]
        spans = range(first, (end - 1) // record[SPAN_BLOCKS] + 1)
        if end == 0 or (len(spans) == 1 and shared == 0):
            continue
        for n in range(record[N]):
            peak, total, values = _NONE, _ZERO, out[row, n]
            place = record[OUT] + 4 * (row * record[N] + n) * head_size
            for h in range(head_size):
                values[h] = _ZERO
            for span in spans:
                slot = slots[s, span, n]
                top = max(peak, slot[head_size])
                shrink, factor = _power(peak - top), _power(slot[head_size] - top)
                peak, total = top, _fused(slot[head_size + 1], factor, total * shrink)
                own = ((s * record[SPANS] + span) * record[N] + n) * (head_size + 2)
                own = record[SLOTS] + 4 * own
                if head_size % LANES == 0:
                    _fold_lanes(place, shrink, own, factor, head_size)
                else:
                    _fold_narrow(place, shrink, own, factor, head_size)
            inverse = _ONE / total
            for h in range(head_size):
                values[h] *= inverse
            lse[row, n] = (peak + np.float32(math.log2(total))) * _LN_2


def chunks_of(numbers: Numbers):
    """What attends to the spans that begin in a chunk of the blocks: `(record, index, chunks)`."""
    score = _score_by(numbers)
    attend_narrow, attend_lanes, attend_wide = (
        _attend_by(width, numbers, score) for width in (4, LANES, _WIDEST)
    )
    per_word, pack = numbers.per_word, numbers.pack

    @compiled_for(numbers.name)
    def run_chunk(record, index, chunks):
        q, tables, out, lse = arrays_of(record)
        num_heads, head_size, block_size = record[N], record[H], record[B]
        group, factor = num_heads // record[K], scale_of(record) * _LOG2_E
        lines = (max(CHUNK_TOKENS, block_size) + LANES - 1) // LANES * LANES
        size = (head_size + 1) * lines + 2 * num_heads * head_size + LANES
        # Zeros: what lies beside the keys of a short chunk is a number.
        memory = np.zeros(size, np.float32)
        offset = -(address_of(memory) // 4) % LANES
        own = memory[offset + head_size * lines :][:lines]
        rest = memory[offset + (head_size + 1) * lines :]
        query = rest[: num_heads * head_size].reshape(num_heads, head_size)
        acc = rest[num_heads * head_size :][: num_heads * head_size].reshape(num_heads, head_size)
        peak, total = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
        turned = address_of(memory) + 4 * offset
        scores = turned + 4 * head_size * lines
        queries = scores + 4 * lines
        work = (queries, turned, scores, queries + 4 * query.size, peak, total, own)
        words, row_bytes = head_size // per_word, 4 * record[ROW] // per_word
        sizes = (record[K], group, block_size, row_bytes, head_size, words, record[P])

        slots, span_blocks, before = slots_of(record), record[SPAN_BLOCKS], 0
        low, high = record[COUNT] * index // chunks, record[COUNT] * (index + 1) // chunks
        for s in range(record[S]):
            row, length, first, begin, end = _extent(record, s)
            if begin == end:
                continue
            following = min(s + 1, record[S] - 1)
            _, _, _, next_begin, next_end = _extent(record, following)
            distance = 2
            ahead = (distance, end, tables[following], next_begin, next_end - next_begin)
            whole = (
                begin // span_blocks == (end - 1) // span_blocks and shared_spans(record, s) == 0
            )
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
                    pack(queries + 4 * n * head_size, head_size)
                args = (record[KV], tables[s], *blocks, length, first, sizes, ahead, work)
                if head_size % _WIDEST == 0:
                    attend_wide(*args)
                elif head_size % LANES == 0:
                    attend_lanes(*args)
                else:
                    attend_narrow(*args)
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

    return run_chunk
