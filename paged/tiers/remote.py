"""Blocks on a Valkey or Redis server, which many engines share.

A block is a string under a prefix and its key. How much the server holds, and what goes for what,
is its own affair: give it `maxmemory` and `maxmemory-policy allkeys-lru`. (Under `noeviction` a
full one takes nothing new.) One server, not a cluster: questions are about many keys at once.

Nobody waits for a server. What is there is asked for a whole sequence in a thread, for which the
engine waits a fraction of a second; blocks are written behind and read in pieces. The first failure
of any of these is logged and opens a breaker: from then on nothing is there, what is to be written
is dropped, and every few seconds the next question is asked without waiting for its answer. If one
comes in time the breaker closes. Answers are remembered to know what need not be written, and may
be wrong by then: whatever is read is checked like a file, so at worst it is a miss.

Mooncake's store (`mooncake-transfer-engine-non-cuda` 0.3.13) was tried over TCP and works, but was
not taken: its wheel needs libibverbs and libcudart, which it does not bring, its blocks live in the
engines' own processes and go with them, and a put waits four seconds for a master that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import compress, islice

import numpy as np

from .block_format import BadBlock, decode, encoded, num_bytes
from .breaker import Breaker
from .pins import TierPins
from .remote_client import connect, is_refusal
from .tier import TierStats
from .write_behind import WriteBehind

logger = logging.getLogger(__name__)

PREFIX = "octavo:"
# An engine waits so long for an answer, once in an outage.
_LOOK_UP_SECONDS = 0.25
# Longer than any straggler of an outage takes.
_PAUSE_SECONDS = 5.0
# What a batch may take to be read, and what waits to be written when the tier is closed.
_READ_SECONDS = _CLOSE_SECONDS = 5.0
_QUEUE_BYTES = 1 << 28
# Of one reply, so that there is a bound on how long it takes and on what it takes up.
_PIECE_BYTES = 1 << 23
# Keys in one question of how many of them exist.
_CHUNK_KEYS = 64
_MAX_KNOWN = 1 << 17
_ASKER = "octavo-tier-asker"


class RemoteTier:
    """A `Tier` on a server. It may be dead from the start, and come and go.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        block_bytes: bytes of a block.
        block_size: tokens of a block, B.
        queue_bytes: payloads that may wait to be written; more are dropped.
        look_up_seconds: how long `look_up` waits for the server.
        pause_seconds: how long the server is left alone after a failure.

    Raises:
        ImportError: the client, redis, is not installed.
        ValueError: no URL of a server.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        *,
        block_bytes: int,
        block_size: int,
        queue_bytes: int = _QUEUE_BYTES,
        look_up_seconds: float = _LOOK_UP_SECONDS,
        pause_seconds: float = _PAUSE_SECONDS,
    ):
        self._redis, where = connect(url)
        self._value_bytes = num_bytes(block_size, block_bytes)
        self._piece = max(_PIECE_BYTES // self._value_bytes, 1)
        self._look_up_seconds = look_up_seconds
        self._server = Breaker(
            f"the remote cache at {where} is left alone until it answers again", pause_seconds
        )
        self._writes = Breaker(f"the remote cache at {where} takes no blocks", pause_seconds)
        self.pins = TierPins(0)  # what the server evicts is its own affair
        self._lock = threading.Lock()
        self._hits = self._misses = self._drops = self._errors = 0
        # What was there when it was last asked, read or written; the oldest of it first.
        self._known: dict[bytes, None] = {}
        self._touched: Sequence[bytes] = ()
        self._writer = WriteBehind(self._write, queue_bytes)
        self._write_until = float("inf")
        self._is_closed = False
        self._asker = ThreadPoolExecutor(1, _ASKER)
        # So that a server that is not there is heard of at the start.
        self._asking: Future[None] = self._asker.submit(self._ask, (), float("inf"))

    def __contains__(self, key: bytes) -> bool:
        return key in self._known and not self._server.is_open

    def look_up(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        if self._is_closed or not self._server.may_try:
            return
        until, waits = time.monotonic() + self._look_up_seconds, not self._server.is_open
        if waits:
            wait([self._asking], self._look_up_seconds)  # the one before, at the start say
        if self._asking.done():
            self._asking = self._asker.submit(self._ask, keys, until)
            if waits:
                wait([self._asking], until - time.monotonic())
        if waits and not self._asking.done():
            self._failed(f"no answer within {self._look_up_seconds} s")

    def _ask(self, keys: Sequence[bytes], until: float) -> None:
        """Look keys up, in the asker's thread; the answer is of use until then."""
        chunks = [keys[i : i + _CHUNK_KEYS] for i in range(0, len(keys), _CHUNK_KEYS)]
        try:
            # How many of each chunk are there; of the first that is not whole, which.
            questions = [("EXISTS", *_names(chunk)) for chunk in chunks]
            _, *counts = self._run([("PING",), *questions])
            whole = next((i for i, c in enumerate(chunks) if counts[i] < len(c)), len(chunks))
            held = [key for chunk in chunks[:whole] for key in chunk]
            if whole < len(chunks) and counts[whole]:
                each = self._run([("EXISTS", name) for name in _names(chunks[whole])])
                held += compress(chunks[whole], each)
            if time.monotonic() > until:
                raise TimeoutError("its answer came too late")
        except Exception as error:  # whatever it is that answers there
            self._failed(error)
        else:
            self._remember(held, instead_of=keys)
            self._server.worked()
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._asker.submit(self._send_touched)

    def _send_touched(self) -> None:
        """Tell the server what was used, in the asker's thread; nobody waits for that."""
        touched, self._touched = _names(self._touched), ()
        try:
            if touched:
                self._run([("TOUCH", *touched)])
        except Exception as error:
            self._failed(error)

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """See `Tier`; dropped if too much waits to be written, or the server takes nothing."""
        if key in self:
            return
        takes = not self._server.is_open and self._writes.may_try
        if not takes or not self._writer.put(key, tokens, payload):
            self._drop()

    def _write(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """Store a block; on the writer's thread."""
        if key in self:  # put twice in a row, or found while it waited
            return
        late = time.monotonic() > self._write_until
        if late or self._server.is_open or not self._writes.may_try:
            self._drop()
            return
        try:
            self._redis.set(PREFIX + key.hex(), b"".join(encoded(key, tokens, payload)))
        except Exception as error:  # the thread must live on
            if not is_refusal(error):
                self._failed(error)
                return
            with self._lock:
                self._errors += 1
            self._writes.failed(error)
        else:
            self._writes.worked()
            self._remember([key])

    def read(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> int:
        """See `Tier`."""
        count, until = 0, time.monotonic() + _READ_SECONDS
        while count < len(keys) and not (self._server.is_open or self._is_closed):
            piece = keys[count : count + self._piece]
            got = self._read_piece(piece, tokens[count:], out[count:])
            count += got
            if got < len(piece):
                break
            if count < len(keys) and time.monotonic() > until:
                self._failed(f"it took more than {_READ_SECONDS} s to send {count} blocks")
        with self._lock:
            self._hits += count
            self._misses += count < len(keys)
        return count

    def _read_piece(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> int:
        try:
            # One byte more than is right, and no more, whatever it is that lies there.
            values = self._run(
                [("GETRANGE", name, 0, self._value_bytes) for name in _names(keys)],
                raise_on_error=False,
            )
            for value in values:
                if isinstance(value, Exception) and "WRONGTYPE" not in str(value):
                    raise value
        except Exception as error:
            self._failed(error)
            return 0
        self._remember((), instead_of=[k for k, v in zip(keys, values, strict=True) if not v])
        for i, value in enumerate(values):
            if not value:
                return i
            try:
                if isinstance(value, Exception):
                    raise BadBlock("it is no string")
                decode(value, keys[i], tokens[i], out[i])
            except BadBlock as error:
                self._remove(keys[i], error)
                return i
        return len(keys)

    def _remove(self, key: bytes, error: BadBlock) -> None:
        name = PREFIX + key.hex()
        logger.warning("remote block %s is not used: %s", name, error)
        with self._lock:
            self._errors += 1
        self._remember((), instead_of=[key])
        with contextlib.suppress(Exception):  # it is found out again
            self._redis.unlink(name)

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `Tier`; the server hears of it after the next question."""
        self._touched = keys

    def flush(self) -> None:
        """See `Tier`."""
        self._writer.flush()

    def clear(self, *, keep_pinned: bool = False) -> None:
        """See `Tier`; blocks of other models and engines go as well. There are no pins."""
        self._writer.clear()
        try:
            names = self._redis.scan_iter(f"{PREFIX}*", count=1000)
            while some := list(islice(names, 1000)):
                self._redis.unlink(*some)
        except Exception as error:
            self._failed(error)
        with self._lock:
            self._known.clear()

    def close(self) -> None:
        """See `Tier`; what cannot be written in a few seconds is dropped."""
        self._write_until = time.monotonic() + _CLOSE_SECONDS
        self._writer.close()
        self._is_closed = True
        # The garbage collector may call from anywhere.
        is_asker = threading.current_thread().name.startswith(_ASKER)
        self._asker.shutdown(wait=not is_asker, cancel_futures=True)
        self._redis.close()
        with self._lock:
            self._known.clear()

    def stats(self) -> TierStats:
        """See `Tier`; blocks are those that this engine has written or seen there lately."""
        with self._lock:
            return TierStats(
                num_blocks=len(self._known),
                num_bytes=len(self._known) * self._value_bytes,
                budget_bytes=0,
                hits=self._hits,
                misses=self._misses,
                evictions=0,
                drops=self._drops,
                errors=self._errors,
            )

    def _run(self, commands: Sequence[tuple], *, raise_on_error: bool = True) -> list:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=raise_on_error)

    def _remember(self, keys: Iterable[bytes], *, instead_of: Sequence[bytes] = ()) -> None:
        with self._lock:
            for key in instead_of:
                self._known.pop(key, None)
            self._known.update(dict.fromkeys(keys))
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def _drop(self) -> None:
        with self._lock:
            self._drops += 1

    def _failed(self, reason: object) -> None:
        with self._lock:
            self._errors += 1
            self._known.clear()  # it may come back with nothing
        self._server.failed(reason)


def _names(keys: Sequence[bytes]) -> list[str]:
    return [PREFIX + key.hex() for key in keys]
