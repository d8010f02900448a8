"""A thread that stores blocks one after the other, so that nobody waits for a slow store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

Write = Callable[[bytes, np.ndarray, np.ndarray], None]


class WriteBehind:
    """A queue of blocks, of bounded bytes, and the thread that empties it.

    The thread starts with the first block and is stopped by `close`.

    Args:
        write_fn: stores a block; must not raise.
        max_bytes: payloads that wait at most.
    """

    def __init__(self, write_fn: Write, max_bytes: int):
        self._write_fn = write_fn
        self._max_bytes = max_bytes
        # The first one is being written.
        self._queue: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._num_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def get(self, key: bytes) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens and payload of a block that waits, if it does."""
        return self._queue.get(key)

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> bool:
        """Queue a copy of a block; False if there is no room for it."""
        with self._changed:
            if key in self._queue:
                return True
            if self._closed or self._num_bytes + payload.nbytes > self._max_bytes:
                return False
            self._queue[key] = tokens.copy(), payload.copy()
            self._num_bytes += payload.nbytes
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="octavo-tier-writer", daemon=True
                )
                self._thread.start()
            return True

    def flush(self) -> None:
        """Wait until the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)

    def clear(self) -> None:
        """Forget what waits, and wait for what is being written."""
        with self._changed:
            for key in list(self._queue)[1:]:
                self._num_bytes -= self._queue.pop(key)[1].nbytes
            self._changed.wait_for(lambda: not self._queue)

    def close(self) -> None:
        """Write what waits, and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The garbage collector may call from anywhere.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                key, (tokens, payload) = next(iter(self._queue.items()))
            try:
                self._write_fn(key, tokens, payload)
            finally:
                with self._changed:
                    del self._queue[key]
                    self._num_bytes -= payload.nbytes
                    self._changed.notify_all()
