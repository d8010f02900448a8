"""What a call of attention on a CPU with Numba is about, noted once for all threads."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.np.numpy_support import carray

from ..layout import NULL_BLOCK
from ..xla_ffi import ARGS, DATA, RETS, pointer_to
from ..xla_threads import OWN, buffer_of, compiled, shape_of

# Words of the record of a call, which threads share: addresses, sizes, options, items.
Q, KV, TABLES, LENS, STARTS, SCALE, OUT, LSE, SLOTS = range(OWN, OWN + 9)
T, N, H, P, K, B, ROW, S, M, SPANS = range(OWN + 9, OWN + 19)
WINDOW, SPAN_BLOCKS, IS_CAUSAL, COUNT, CHUNKS, TILES = range(OWN + 19, OWN + 25)
# Of shared prefixes, if there are any: as many groups as sequences, some of them empty.
GROUPS, ORDER, GROUP_START, LEADER, GROUP_BLOCKS, NUM_BLOCKS = range(OWN + 25, OWN + 31)
RECORD_WORDS = OWN + 31


@compiled()
def fill_record(record, frame):
    """Note all that the frame says; returns how many threads there are.

    XLA may use the frame for another call before this one is over.
    """
    for at, index in ((Q, 0), (KV, 1), (TABLES, 2), (LENS, 3), (STARTS, 4), (SCALE, 5)):
        record[at] = buffer_of(frame[ARGS], index)[DATA]
    for at, index in ((OUT, 0), (LSE, 1), (SLOTS, 2)):
        record[at] = buffer_of(frame[RETS], index)[DATA]
    q, kv = shape_of(frame[ARGS], 0, 3), shape_of(frame[ARGS], 1, 4)
    tables, slots = shape_of(frame[ARGS], 2, 2), shape_of(frame[RETS], 2, 4)
    numbers = carray(pointer_to(buffer_of(frame[ARGS], 6)[DATA], types.int32), (4,))
    record[T], record[N], record[H] = q[0], q[1], q[2]
    record[P], record[K], record[B], record[ROW] = kv[0], kv[1], kv[2], kv[3]
    record[S], record[M], record[SPANS] = tables[0], tables[1], slots[1]
    record[WINDOW], record[SPAN_BLOCKS] = numbers[0], numbers[1]
    record[IS_CAUSAL] = numbers[3]
    record[GROUPS] = shape_of(frame[ARGS], 7, 1)[0]
    for at, index in (
        (ORDER, 7),
        (GROUP_START, 8),
        (LEADER, 9),
        (GROUP_BLOCKS, 10),
        (NUM_BLOCKS, 11),
    ):
        record[at] = buffer_of(frame[ARGS], index)[DATA]
    return np.int64(numbers[2])


@compiled()
def queries_of(record, s):
    """(first row, number of queries, context length) of sequence s, or of group s - S.

    (0, 0, 0) if there is nothing to do: lists that do not fit together are an error, but nothing
    to read or write elsewhere for. A group's queries are in places of their order, not in rows.
    """
    if s >= record[S]:
        group = s - record[S]
        starts = carray(pointer_to(record[GROUP_START], types.int32), (record[GROUPS] + 1,))
        begin, end = np.int64(starts[group]), np.int64(starts[group + 1])
        length = _whole_spans(record, record[GROUP_BLOCKS], group) * record[SPAN_BLOCKS] * record[B]
        if not (0 <= begin < end <= record[T]) or length < 1 or length > record[M] * record[B]:
            return 0, 0, 0
        return begin, end - begin, length
    starts = carray(pointer_to(record[STARTS], types.int32), (record[S] + 1,))
    begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
    length = np.int64(carray(pointer_to(record[LENS], types.int32), (record[S],))[s])
    if not (0 <= begin < end <= record[T]) or length < 1 or length > record[M] * record[B]:
        return 0, 0, 0
    return begin, end - begin, length


@compiled()
def _whole_spans(record, address, index):
    """How many spans lie within the blocks that a list has at an index."""
    count = carray(pointer_to(address, types.int32), (record[GROUPS],))[index]
    return max(np.int64(count), 0) // record[SPAN_BLOCKS]


@compiled()
def shared_spans(record, s):
    """The leading spans of sequence s that its group's tiles attend to."""
    return _whole_spans(record, record[NUM_BLOCKS], s) if record[GROUPS] > 0 else 0


@compiled()
def row_of(record, s, place):
    """The row of a query that `queries_of` speaks of."""
    return place if s < record[S] else _listed(record, record[ORDER], place)


@compiled()
def table_of(record, s):
    """The sequence whose block table a sequence, or a group, goes by."""
    return s if s < record[S] else _listed(record, record[LEADER], s - record[S])


@compiled()
def _listed(record, address, index):
    """A sequence in a list; one that exists, whatever the list says."""
    s = np.int64(carray(pointer_to(address, types.int32), (record[GROUPS],))[index])
    return min(max(s, 0), record[S] - 1)


@compiled()
def slots_of(record):
    """Unmerged results, by sequence and span: values, peak and total."""
    shape = (record[S], record[SPANS], record[N], record[H] + 2)
    return carray(pointer_to(record[SLOTS], types.float32), shape)


@compiled()
def block_of(table, b, num_blocks):
    """The block in column b; the null block in place of one that does not exist.

    XLA would go through all tables in each layer, unused columns too.
    """
    block_id = np.int64(table[b])
    return block_id if 0 <= block_id < num_blocks else NULL_BLOCK


@compiled()
def scale_of(record):
    """The factor on the scores."""
    return carray(pointer_to(record[SCALE], types.float32), (1,))[0]


@compiled()
def arrays_of(record):
    """(q, block tables, out, lse)."""
    heads = (record[T], record[N], record[H])
    return (
        carray(pointer_to(record[Q], types.float32), heads),
        carray(pointer_to(record[TABLES], types.int32), (record[S], record[M])),
        carray(pointer_to(record[OUT], types.float32), heads),
        carray(pointer_to(record[LSE], types.float32), heads[:2]),
    )


@compiled()
def clear_rest(record):
    """Fill the rows that no sequence will: with zeros, and -inf."""
    _, _, out, lse = arrays_of(record)
    starts = carray(pointer_to(record[STARTS], types.int32), (record[S] + 1,))
    begin, end = 0, 0  # of what the sequences fill, side by side
    for s in range(record[S]):
        first, num_queries, _ = queries_of(record, s)
        if num_queries == 0 and starts[s] == starts[s + 1]:
            continue
        if num_queries == 0 or (end > 0 and first != end):
            begin, end = 0, 0  # the lists do not fit together: clear it all
            break
        begin, end = (begin if end > 0 else first), first + num_queries
    for row in range(record[T]):
        if not begin <= row < end:
            out[row] = 0
            lse[row] = -np.inf
