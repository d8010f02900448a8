"""What a call of attention on a CPU with Numba is about, noted once for all threads."""

from __future__ import annotations

import functools

import numpy as np
from numba import njit, types
from numba.np.numpy_support import carray

from ..xla_ffi import API, ARGS, DATA, DIMS, RETS, pointer_to

# Words of the record of a call, which threads share until the last one lets go of it: addresses,
# sizes, options, who is how far, and the arguments of functions of XLA.
Q, KV, TABLES, LENS, STARTS, SCALE, OUT, LSE, SLOTS, XLA_API = range(10)
T, N, H, P, K, B, ROW, S, M, SPANS = range(10, 20)
WINDOW, SPAN_BLOCKS, IS_CAUSAL, IN_TILES = range(20, 24)
COUNT, CHUNKS, TILES = range(24, 27)
REFERENCES, NEXT, LEFT = range(27, 30)
FUTURE_ARGS, SCHEDULE_ARGS, RECORD_WORDS = 32, 40, 48

compiled = functools.partial(njit, nogil=True, error_model="numpy")


@compiled()
def _buffer(list_address, index):
    """The words of an operand or result."""
    addresses = carray(pointer_to(list_address, types.int64), (index + 1,))
    return carray(pointer_to(addresses[index], types.int64), (DIMS + 1,))


@compiled()
def fill_record(record, frame):
    """Note all that the frame says; returns how many threads there are.

    XLA may use the frame for another call before this one is over.
    """
    for at, index in ((Q, 0), (KV, 1), (TABLES, 2), (LENS, 3), (STARTS, 4), (SCALE, 5)):
        record[at] = _buffer(frame[ARGS], index)[DATA]
    for at, index in ((OUT, 0), (LSE, 1), (SLOTS, 2)):
        record[at] = _buffer(frame[RETS], index)[DATA]
    q = carray(pointer_to(_buffer(frame[ARGS], 0)[DIMS], types.int64), (3,))
    kv = carray(pointer_to(_buffer(frame[ARGS], 1)[DIMS], types.int64), (4,))
    tables = carray(pointer_to(_buffer(frame[ARGS], 2)[DIMS], types.int64), (2,))
    slots = carray(pointer_to(_buffer(frame[RETS], 2)[DIMS], types.int64), (2,))
    numbers = carray(pointer_to(_buffer(frame[ARGS], 6)[DATA], types.int32), (5,))
    record[T], record[N], record[H] = q[0], q[1], q[2]
    record[P], record[K], record[B], record[ROW] = kv[0], kv[1], kv[2], kv[3]
    record[S], record[M], record[SPANS] = tables[0], tables[1], slots[1]
    record[WINDOW], record[SPAN_BLOCKS] = numbers[0], numbers[1]
    record[IS_CAUSAL], record[IN_TILES] = numbers[3], numbers[4]
    record[XLA_API] = frame[API]
    return np.int64(numbers[2])


@compiled()
def queries_of(record, s):
    """(first row, number of queries, context length) of sequence s.

    (0, 0, 0) if there is nothing to do: lists that do not fit together are an error, but nothing
    to read or write elsewhere for.
    """
    starts = carray(pointer_to(record[STARTS], types.int32), (record[S] + 1,))
    begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
    length = np.int64(carray(pointer_to(record[LENS], types.int32), (record[S],))[s])
    if not (0 <= begin < end <= record[T]) or length < 1 or length > record[M] * record[B]:
        return 0, 0, 0
    return begin, end - begin, length


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
