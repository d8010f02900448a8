"""A Valkey or Redis server of the tests' own, to be killed, stopped and filled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis, RedisError

PROGRAM = next(filter(None, map(shutil.which, ("valkey-server", "redis-server"))), None)


class ValkeyServer:
    """A server on a port that stays its own when it is started again.

    Args:
        folder: for what it keeps on disk, if it keeps anything.
    """

    def __init__(self, folder: Path):
        if PROGRAM is None:
            pytest.skip("needs a valkey-server or redis-server on PATH")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = Redis(port=self.port, socket_timeout=5, protocol=2)
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self, *options: str, password: str | None = None) -> None:
        """Start it, and wait until it answers."""
        assert PROGRAM is not None
        own = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)]
        own += ["--save", "", *options]
        if password is not None:
            own += ["--requirepass", password]
        self._process = subprocess.Popen(
            [PROGRAM, *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            probe = Redis(port=self.port, password=password, socket_timeout=5, protocol=2)
            with contextlib.suppress(RedisError), probe:
                probe.ping()
                return
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it at once, and all that it holds with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, it is there and does nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Leave nothing behind."""
        self.client.close()
        self.kill()
