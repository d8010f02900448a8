"""Attention of several queries to a sequence, on a CPU with Numba: prefill, and shared prefixes.

The queries of a KV head are cut into tiles, a query in each place of a wide vector, and keys and
values are numbers that they are multiplied with, read from the blocks where they lie. Keys are
taken in chunks and spans, where their own positions say, each place is computed as if it were
alone, and decode computes what is in a place here in the same order (`numba_decode`): so no bit
depends on what else is computed, or by how many threads.
"""

from __future__ import annotations

import math

import numpy as np

from ..vectors import (
    add_products,
    larger,
    load,
    only_between,
    power_of_two,
    splat,
    store,
    transpose_square,
    widest,
)
from ..xla_ffi import prefetch
from ..xla_threads import address_of, compiled, compiled_for
from .numba_numbers import Numbers
from .numba_record import (
    GROUPS,
    IS_CAUSAL,
    KV,
    ROW,
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
    row_of,
    scale_of,
    shared_spans,
    slots_of,
    table_of,
)

WIDEST = widest()
_SQUARE = min(16, WIDEST // 2)
CHUNK_TOKENS, _CACHE_LINE = 64, 64
# Weights are summed up side by side, every so many keys, and then these sums by halves.
LANES = 16
_LOG2_E, _LN_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
_ZERO, _ONE, _NONE = np.float32(0), np.float32(1), np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min
_I0, _I1, _I2, _I3 = (np.int32(i) for i in range(4))


def _attend_to(width: int, numbers: Numbers):
    """What folds a chunk of keys into the softmax of a tile of `width` queries."""
    line, per_word, add_word = 4 * width, numbers.per_word, numbers.add_word
    pack_lines = numbers.pack_lines_by(width)
    gather_values, values_of = numbers.gather_values, numbers.values_of

    @compiled_for(width, numbers.name)
    def attend(kv, table, begin, end, last, k, sizes, is_masked, tile):
        """Blocks `table[begin:end]` of the cache at the address `kv`, KV head k.

        What is to follow, up to block `last`, is fetched meanwhile.
        """
        num_kv_heads, block_size, row, head_size, pool = sizes
        query, scores, sums, acc, peak, total, low, high, values = tile
        none = splat(_ZERO, width)
        place = scores
        for b in range(begin, end):
            key = kv + (block_of(table, b, pool) * num_kv_heads + k) * block_size * row
            following = block_of(table, min(b + end - begin, last), pool)
            fetched = kv + (following * num_kv_heads + k) * block_size * row
            for t in range(0, block_size, 4):
                for i in range(0, 4 * row, _CACHE_LINE):
                    prefetch(fetched + i)
                fetched += 4 * row
                s0, s1, s2, s3 = none, none, none, none
                for h in range(head_size // per_word):
                    q, at = load(query + h * line, width), key + 4 * h
                    s0 = add_word(s0, at, q)
                    s1 = add_word(s1, at + row, q)
                    s2 = add_word(s2, at + 2 * row, q)
                    s3 = add_word(s3, at + 3 * row, q)
                if is_masked:
                    position = np.int32(b * block_size + t)
                    s0 = only_between(s0, position + _I0, low, high)
                    s1 = only_between(s1, position + _I1, low, high)
                    s2 = only_between(s2, position + _I2, low, high)
                    s3 = only_between(s3, position + _I3, low, high)
                store(place, s0)
                store(place + line, s1)
                store(place + 2 * line, s2)
                store(place + 3 * line, s3)
                place += 4 * line
                key += 4 * row

        num_keys = (end - begin) * block_size
        before = load(peak, width)
        highest = before
        for t in range(num_keys):
            highest = larger(load(scores + t * line, width), highest)
        store(peak, highest)
        # Who has seen nothing yet has no peak to take off.
        highest = larger(highest, splat(_LOWEST, width))
        shrink = power_of_two(before - highest)
        for first in range(LANES):
            added = none
            for t in range(first, num_keys, LANES):
                weight = power_of_two(load(scores + t * line, width) - highest)
                store(scores + t * line, weight)
                added = added + weight
            store(sums + first * line, added)
        half = LANES // 2
        while half > 0:
            for i in range(half):
                added = load(sums + i * line, width) + load(sums + (half + i) * line, width)
                store(sums + i * line, added)
            half //= 2
        store(total, add_products(load(sums, width), load(total, width), shrink))

        pack_lines(scores, line, num_keys)
        gather_values(kv, table, begin, end, k, sizes, values)
        for h in range(0, head_size, 4):
            own = acc + h * line
            a0, a1 = load(own, width) * shrink, load(own + line, width) * shrink
            a2, a3 = load(own + 2 * line, width) * shrink, load(own + 3 * line, width) * shrink
            place = scores
            for b in range(begin, end):
                value, step = values_of(kv, table, b, begin, k, sizes, values)
                value += 4 * h
                for _ in range(block_size // per_word):
                    weight = load(place, width)
                    a0 = add_word(a0, value, weight)
                    a1 = add_word(a1, value + 4, weight)
                    a2 = add_word(a2, value + 8, weight)
                    a3 = add_word(a3, value + 12, weight)
                    place += line
                    value += step
            store(own, a0)
            store(own + line, a1)
            store(own + 2 * line, a2)
            store(own + 3 * line, a3)

    return attend


def _fold_by(width: int):
    """What folds a span into those before it, and makes room for the next one."""
    line = 4 * width

    @compiled_for(width)
    def fold(head_size, span, whole):
        acc, peak, total = span
        all_acc, all_peak, all_total = whole
        before, own = load(all_peak, width), load(peak, width)
        top = larger(before, own)
        store(all_peak, top)
        store(peak, splat(_NONE, width))
        # Who has seen nothing yet has no peak to take off.
        top = larger(top, splat(_LOWEST, width))
        shrink, factor, none = power_of_two(before - top), power_of_two(own - top), top - top
        added = add_products(load(all_total, width) * shrink, load(total, width), factor)
        store(all_total, added)
        store(total, none)
        for h in range(head_size):
            added = load(all_acc + h * line, width) * shrink
            store(all_acc + h * line, add_products(added, load(acc + h * line, width), factor))
            store(acc + h * line, none)

    return fold


_fold_wide, _fold_narrow = _fold_by(WIDEST), _fold_by(WIDEST // 2)


@compiled()
def _tiles_of(record, s):
    """How many tiles the queries of sequence s make for each KV head."""
    _, num_queries, _ = queries_of(record, s)
    if num_queries == 0 or (num_queries == 1 and s < record[S]):
        return 0
    return (num_queries * (record[N] // record[K]) + WIDEST - 1) // WIDEST


@compiled()
def count_tiles(record):
    """(tiles of all sequences and KV heads, operations they take at most)."""
    count, operations = 0, 0
    for s in range(record[S] + record[GROUPS]):
        tiles, (_, _, length) = _tiles_of(record, s) * record[K], queries_of(record, s)
        count += tiles
        operations += tiles * WIDEST * length * record[H] * 4
    return count, operations


@compiled()
def _padded(head_size):
    """Numbers of a head, whole squares of them."""
    return (head_size + _SQUARE - 1) // _SQUARE * _SQUARE


@compiled()
def _place_of(record, s, k, i):
    """(row, head) of query i of those that sequence s has of a KV head."""
    group = record[N] // record[K]
    return row_of(record, s, queries_of(record, s)[0] + i // group), k * group + i % group


@compiled()
def _write_out(record, s, k, first, count, peak, total, rows, acc, line):
    """Write the results of `count` queries that lie side by side from the address `acc` on."""
    _, _, out, lse = arrays_of(record)
    slots = slots_of(record)
    head_size, (num_rows, row_len) = record[H], rows.shape
    for begin in range(0, count, num_rows):
        for h in range(0, row_len, _SQUARE):
            place = address_of(rows) + 4 * h
            transpose_square(acc + h * line + 4 * begin, line, place, 4 * row_len, _SQUARE)
        for i in range(begin, min(begin + num_rows, count)):
            row, n = _place_of(record, s, k, first + i)
            if s >= record[S]:
                last = min(max(shared_spans(record, row), 1), record[SPANS]) - 1
                slot = slots[row, last, n]
                for h in range(head_size):
                    slot[h] = rows[i - begin, h]
                slot[head_size], slot[head_size + 1] = peak[i], total[i]
                continue
            inverse = _ONE / total[i] if total[i] > 0 else _ZERO
            for h in range(head_size):
                out[row, n, h] = rows[i - begin, h] * inverse
            lse[row, n] = (peak[i] + np.float32(math.log2(total[i]))) * _LN_2


def tiles_of(numbers: Numbers):
    """What computes one of all tiles of all sequences and KV heads: `(record, index)`."""
    attend_wide, attend_narrow = (_attend_to(w, numbers) for w in (WIDEST, WIDEST // 2))
    per_word, pack = numbers.per_word, numbers.pack

    @compiled_for(numbers.name)
    def lay_out(record, s, k, first, count, factor, rows, query, line):
        """Write `count` queries side by side, from the address `query` on; `rows` is for a few."""
        q, _, _, _ = arrays_of(record)
        head_size, (num_rows, row_len) = record[H], rows.shape
        for begin in range(0, line // 4, num_rows):
            for i in range(num_rows):
                if begin + i < count:
                    row, n = _place_of(record, s, k, first + begin + i)
                    for h in range(head_size):
                        rows[i, h] = q[row, n, h] * factor
                    pack(address_of(rows) + 4 * i * row_len, head_size)
                else:
                    rows[i] = _ZERO
            for h in range(0, row_len, _SQUARE):
                place = query + h * line + 4 * begin
                transpose_square(address_of(rows) + 4 * h, 4 * row_len, place, line, _SQUARE)

    @compiled_for(numbers.name)
    def compute(record, s, k, first, width, chunk_blocks, memory):
        """Compute the tile from row `first` on, in memory that the caller keeps."""
        head_size, block_size, line = record[H], record[B], 4 * width
        padded = _padded(head_size)
        offset = -(address_of(memory) // 4) % 16  # vectors begin where lines of the cache do
        memory = memory[offset:]
        rows = memory[: _SQUARE * padded].reshape(_SQUARE, padded)
        memory = memory[_SQUARE * padded :]
        lines = memory[: memory.size // width * width].reshape(-1, width)
        # Of the queries: themselves, a span's values and those of all spans, then what is seen.
        acc, seen = lines[padded : 3 * padded], lines[3 * padded :]
        seen[0], seen[1], seen[2], seen[3] = _NONE, _ZERO, _NONE, _ZERO
        low, high = seen[4].view(np.int32), seen[5].view(np.int32)
        query = address_of(lines)
        acc_at, seen_at = query + padded * line, query + 3 * padded * line
        span = acc_at, seen_at, seen_at + line
        whole = acc_at + padded * line, seen_at + 2 * line, seen_at + 3 * line
        sums = seen_at + 6 * line
        tile = (
            query,
            sums + LANES * line,
            sums,
            *span,
            seen_at + 4 * line,
            seen_at + 5 * line,
            sums + (LANES + chunk_blocks * block_size) * line,
        )

        table = arrays_of(record)[1][table_of(record, s)]
        _, num_queries, length = queries_of(record, s)
        group = record[N] // record[K]
        count, window = min(width, num_queries * group - first), record[WINDOW]
        rows[:], acc[:], low[:], high[:] = _ZERO, _ZERO, 1, 0
        lay_out(record, s, k, first, count, scale_of(record) * _LOG2_E, rows, query, line)
        for i in range(count):
            own = length - num_queries + (first + i) // group
            high[i] = own if record[IS_CAUSAL] and s < record[S] else length - 1
            low[i] = max(0, high[i] - window + 1) if window > 0 else 0

        sizes = (record[K], block_size, 4 * record[ROW] // per_word, head_size, record[P])
        last_low, last_high = low[count - 1], high[count - 1]
        num_blocks = last_high // block_size + 1
        begin = low[0] // block_size // chunk_blocks * chunk_blocks
        while begin < num_blocks:
            end = min(begin + chunk_blocks, num_blocks)
            is_masked = end * block_size > high[0] + 1 or begin * block_size < last_low
            args = (record[KV], table, begin, end, num_blocks - 1, k, sizes, is_masked, tile)
            if width == WIDEST:
                attend_wide(*args)
            else:
                attend_narrow(*args)
            begin = end
            if begin % record[SPAN_BLOCKS] == 0 or begin == num_blocks:
                if width == WIDEST:
                    _fold_wide(head_size, span, whole)
                else:
                    _fold_narrow(head_size, span, whole)
        _write_out(record, s, k, first, count, seen[2], seen[3], rows, whole[0], line)

    @compiled_for(numbers.name)
    def run_tile(record, index):
        s, own = 0, _tiles_of(record, 0) * record[K]
        while index >= own:
            index -= own
            s += 1
            own = _tiles_of(record, s) * record[K]
        rows = record[N] // record[K] * queries_of(record, s)[1]
        wide = (rows + WIDEST // 2 - 1) // WIDEST
        # A head's last wide tile takes longest, and a narrow one is done soon: threads that take
        # them in this order are done together.
        if index < wide * record[K]:
            width, k, first = WIDEST, index // wide, (wide - 1 - index % wide) * WIDEST
        else:
            width, k, first = WIDEST // 2, index - wide * record[K], wide * WIDEST
        block_size = record[B]
        chunk_blocks = max(1, CHUNK_TOKENS // block_size)
        padded = _padded(record[H])
        chunk = chunk_blocks * block_size
        size = (3 * padded + chunk + LANES + 6) * width + padded * _SQUARE + 16
        if per_word > 1:
            size += chunk // per_word * record[H]
        memory = np.empty(size, np.float32)
        compute(record, s, k, first, width, chunk_blocks, memory)

    return run_tile
