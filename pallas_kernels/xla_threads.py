"""A custom call's work, shared out among XLA's own threads.

A call is a record of int64, of which the first `OWN` words are the threads' business. Its work is
items, which whoever is free takes one after the other; nobody waits for anybody. Whoever finishes
the last one tells XLA that all is there, and whoever lets go of the record last frees it. If no
thread comes, the first one does it all.

Import this module only where Numba is installed.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np
from numba import njit, types
from numba.np.numpy_support import carray

from .xla_ffi import (
    API,
    CONTEXT,
    DIMS,
    EXTENSION,
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
    free,
    pointer_to,
)

_XLA_API, _ITEMS, _REFERENCES, _NEXT, _LEFT, _FUTURE_ARGS, _SCHEDULE_ARGS = 0, 1, 2, 3, 4, 5, 8
OWN = 13

compiled = functools.partial(njit, nogil=True, error_model="numpy")


def compiled_for(*what: object):
    """`compiled`, under a name that says what else a function follows from.

    A process may load code that another one has compiled beside its own, where functions of one
    name count as one: and Numba tells a factory's functions apart by numbers that begin anew in
    every process.
    """

    def decorate(function):
        function.__qualname__ += f"[{', '.join(map(str, what))}]"
        return compiled()(function)

    return decorate


def source_digest() -> int:
    """Of all that is compiled here, for a function to close over.

    Numba's cache looks at a function's own file alone, and at what it closes over.
    """
    here = Path(__file__).parent
    sources = sorted([*here.glob("*.py"), *here.glob("*/numba_*.py")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).digest()
    return int.from_bytes(digest[:7], "little")


@compiled()
def address_of(array):
    """Where an array begins; signed: Numba makes a float of what is unsigned and then signed."""
    return np.int64(array.ctypes.data)


@compiled()
def buffer_of(list_address, index):
    """The words of an operand or result."""
    addresses = carray(pointer_to(list_address, types.int64), (index + 1,))
    return carray(pointer_to(addresses[index], types.int64), (DIMS + 1,))


@compiled()
def shape_of(list_address, index, num_axes):
    """The shape of an operand or result."""
    return carray(pointer_to(buffer_of(list_address, index)[DIMS], types.int64), (num_axes,))


@compiled()
def answer_question(frame):
    """Whether XLA only asked for the version that a handler is written for; it is told."""
    if frame[EXTENSION] == 0:
        return False
    extension = carray(pointer_to(frame[EXTENSION], types.int64), (METADATA + 1,))
    if extension[1] & 0xFFFFFFFF != METADATA_TYPE:
        return False
    api = carray(pointer_to(frame[API], types.int64), (VERSION + 1,))
    metadata = pointer_to(extension[METADATA], types.int64)
    carray(metadata, (METADATA_VERSION + 1,))[METADATA_VERSION] = api[VERSION]
    return True


@compiled()
def threads_of(frame, num_threads):
    """How many of them may be used: one, if this is no XLA whose functions are known."""
    api = carray(pointer_to(frame[API], types.int64), (VERSION + 1,))
    return num_threads if OLDEST_MINOR <= (api[VERSION] >> 32) <= NEWEST_MINOR else 1


@compiled()
def share_out(frame, own, num_items, helpers, callback):
    """(address of a copy of the record `own`, address of XLA's error); 0 for none.

    `callback` is the address of what `helpers` threads are to run, beside the one that called.
    Without a record, that one has to do it all by itself.
    """
    if helpers < 1:
        return 0, 0
    address = allocate(8 * own.size)
    if address == 0:
        return 0, 0
    api = carray(pointer_to(frame[API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
    record = carray(pointer_to(address, types.int64), (own.size,))
    for i in range(OWN, own.size):
        record[i] = own[i]
    record[_FUTURE_ARGS], record[_FUTURE_ARGS + 1], record[_FUTURE_ARGS + 2] = 24, 0, 0
    error = call_address(api[FUTURE_CREATE], address + 8 * _FUTURE_ARGS)
    if error != 0:
        free(address)
        return 0, error
    frame[FUTURE] = record[_FUTURE_ARGS + 2]
    record[_XLA_API], record[_ITEMS], record[_LEFT] = frame[API], num_items, num_items
    record[_REFERENCES], record[_NEXT] = 1 + helpers, 0
    record[_SCHEDULE_ARGS], record[_SCHEDULE_ARGS + 1] = 40, 0
    record[_SCHEDULE_ARGS + 2] = frame[CONTEXT]
    record[_SCHEDULE_ARGS + 3], record[_SCHEDULE_ARGS + 4] = callback, address
    for _ in range(helpers):
        if call_address(api[SCHEDULE], address + 8 * _SCHEDULE_ARGS) != 0:
            let_go(address)  # in its place
    return address, 0


@compiled()
def next_item(address):
    """The item to do next; -1 if there is none."""
    index = atomic_add(address + 8 * _NEXT, 1)
    record = carray(pointer_to(address, types.int64), (OWN,))
    return index if index < record[_ITEMS] else -1


@compiled()
def is_last(address):
    """Note that an item is done: was it the last one?"""
    return atomic_add(address + 8 * _LEFT, -1) == 1


@compiled()
def tell_xla(address):
    """All results are there."""
    record = carray(pointer_to(address, types.int64), (OWN,))
    api = carray(pointer_to(record[_XLA_API], types.int64), (FUTURE_SET_AVAILABLE + 1,))
    record[_FUTURE_ARGS] = 24
    call_address(api[FUTURE_SET_AVAILABLE], address + 8 * _FUTURE_ARGS)


@compiled()
def let_go(address):
    """A thread is done with the record."""
    if atomic_add(address + 8 * _REFERENCES, -1) == 1:
        free(address)
