"""Blocks on disk, which survive the process: a folder of files named by their keys.

There is no other index. What is there is listed once at the start, oldest use first by modification
times, and whatever happens to a file happens to that block alone. (Measured beside SQLite with the
same blocks in it: files were read at least ten times as fast, and written four times as fast at
360 KiB a block and, in one try, 0.6 times as fast at 2 MiB. The listing takes two microseconds a
file.) Several processes may share a folder: each keeps its own account of
it, finds what was there when it started, and misses what another one has evicted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .block_file import SCRAP_SUFFIX, SUFFIX, read_block, write_block
from .block_format import BadBlock, num_bytes
from .keys import KEY_BYTES
from .pins import TierPins
from .tier import TierStats, read_run
from .write_behind import WriteBehind

logger = logging.getLogger(__name__)

# A scrap this old is of a process that was killed; a younger one may be of one that writes it.
_SCRAP_SECONDS = 600
_QUEUE_BYTES = 1 << 28


class DiskTier:
    """A `Tier` of files.

    Args:
        folder: where; made if it is not there.
        budget_bytes: for whole files, those of other models included.
        block_bytes: bytes of a block.
        block_size: tokens of a block, B.
        queue_bytes: payloads that may wait to be written; more are dropped.

    Raises:
        ValueError: the budget holds no block.
        OSError: the folder cannot be made or listed.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | Path,
        *,
        budget_bytes: int,
        block_bytes: int,
        block_size: int,
        queue_bytes: int = _QUEUE_BYTES,
    ):
        self._file_bytes = num_bytes(block_size, block_bytes)
        if budget_bytes < self._file_bytes:
            raise ValueError(f"{budget_bytes=} holds no block of {block_bytes=}: give it more")
        self._folder = Path(folder).expanduser()
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._drops = self._errors = 0
        self._last_complaint = ""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its files tell prompts
        # Bytes of each file, the least recently used first.
        self._files: OrderedDict[bytes, int] = self._listed()
        self._num_bytes = sum(self._files.values())
        self.pins = TierPins(budget_bytes // self._file_bytes // 2)
        self._make_room(0)
        self._writer = WriteBehind(self._write, queue_bytes)

    def _listed(self) -> OrderedDict[bytes, int]:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    key = _key_of(entry.name) if entry.is_file(follow_symlinks=False) else None
                    if key is not None:
                        found.append((stat.st_mtime_ns, key, stat.st_size))
                    elif (
                        entry.name.endswith(SCRAP_SUFFIX)
                        and time.time() - stat.st_mtime > _SCRAP_SECONDS
                    ):
                        os.unlink(entry.path)
        return OrderedDict((key, size) for _, key, size in sorted(found))

    def __contains__(self, key: bytes) -> bool:
        return key in self._files or key in self._writer

    def put(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """See `Tier`; dropped if too much waits to be written."""
        if key not in self._files and not self._writer.put(key, tokens, payload):
            with self._lock:
                self._drops += 1

    def look_up(self, keys: Sequence[bytes]) -> None:
        """See `Tier`: its own account is all it goes by."""

    def read(self, keys: Sequence[bytes], tokens: np.ndarray, out: np.ndarray) -> int:
        """See `Tier`."""
        return read_run(self._read, keys, tokens, out)

    def _read(self, key: bytes, tokens: np.ndarray, out: np.ndarray) -> bool:
        path = self._path(key)
        waiting = self._writer.get(key)
        if waiting is not None and np.array_equal(waiting[0], tokens):
            out[:] = waiting[1]
            with self._lock:
                self._hits += 1
            return True
        if key in self._files:
            try:
                read_block(path, key, tokens, out)
                with contextlib.suppress(OSError):  # for the order after a restart
                    os.utime(path)
                with self._lock:
                    self._hits += 1
                return True
            except FileNotFoundError:  # another process has evicted it
                self._forget(key)
            except (BadBlock, OSError) as error:
                self._complain(f"{path} is not used: {error}")
                self._forget(key)
                with contextlib.suppress(OSError):
                    path.unlink()
        with self._lock:
            self._misses += 1
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `Tier`; only for this process, since files of blocks in use were read or written."""
        with self._lock:
            for key in reversed(keys):
                if key in self._files:
                    self._files.move_to_end(key)

    def flush(self) -> None:
        """See `Tier`."""
        self._writer.flush()

    def clear(self, *, keep_pinned: bool = False) -> None:
        """See `Tier`; files of other models go as well."""
        if keep_pinned:
            self._writer.flush()
        else:
            self._writer.clear()
            self.pins.clear()
        with self._lock:
            keys = [key for key in self._files if key not in self.pins]
            self._num_bytes -= sum(self._files.pop(key) for key in keys)
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def close(self) -> None:
        """See `Tier`."""
        self._writer.close()

    def stats(self) -> TierStats:
        """See `Tier`."""
        with self._lock:
            return TierStats(
                num_blocks=len(self._files),
                num_bytes=self._num_bytes,
                budget_bytes=self._budget_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                drops=self._drops,
                errors=self._errors,
                pinned=len(self.pins),
            )

    def _write(self, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
        """Store a block; on the writer's thread."""
        self._make_room(self._file_bytes)
        try:
            write_block(self._path(key), key, tokens, payload)
        except Exception as error:  # the thread must live on
            reason = getattr(error, "strerror", None) or error  # without the name of one file
            self._complain(f"blocks cannot be written to {self._folder}: {reason}", repeated=False)
            return
        self._last_complaint = ""
        with self._lock:
            self._num_bytes += self._file_bytes - self._files.pop(key, 0)
            self._files[key] = self._file_bytes

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._files or self._num_bytes + num_bytes <= self._budget_bytes:
                    return
                while (key := next(iter(self._files))) in self.pins:
                    self._files.move_to_end(key)
                self._num_bytes -= self._files.pop(key)
                self._evictions += 1
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._num_bytes -= self._files.pop(key, 0)

    def _complain(self, message: str, *, repeated: bool = True) -> None:
        with self._lock:
            self._errors += 1
            known, self._last_complaint = self._last_complaint == message, message
        if repeated or not known:
            logger.warning("%s", message)

    def _path(self, key: bytes) -> Path:
        return self._folder / (key.hex() + SUFFIX)


def _key_of(file_name: str) -> bytes | None:
    stem, dot, suffix = file_name.partition(".")
    if dot + suffix != SUFFIX or len(stem) != 2 * KEY_BYTES:
        return None
    with contextlib.suppress(ValueError):
        return bytes.fromhex(stem)
    return None
