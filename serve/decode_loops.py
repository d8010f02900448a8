"""Decode loops on device, the next of which begins before anybody has read what the last one drew.

A loop ends with all that the next one of the same requests starts from: their newest tokens, their
lengths, and which of them go on. So while one runs the host can grow the tables and dispatch the
next behind it, and takes the tokens of the first while the device is at the second. Whether there
were blocks for it is known on device: a loop without room does nothing, and the host finds out when
it comes to its turn.

Invariants:
1. A loop follows another only if nothing else is to be done: its requests run, all of them, nobody
   else runs or waits.
2. What a request that has ended meanwhile draws is dropped. Its blocks may be given back at once,
   because the device comes to whatever happens to them later behind the loops it already has.
3. Whoever is interrupted while taking tokens forgets the loops in flight: the next one begins where
   the host knows that each request is, and draws the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from .config import EngineConfig
from .decode_pace import DecodePace
from .programs import Drawn
from .request import Request
from .runner import DecodeLoop, ModelRunner


class DecodeLoops:
    """The loops that are in flight: none, one, or one and another behind it.

    Args:
        runner: what runs them.
        slice_ms, max_steps: of `EngineConfig`.
        ahead: whether another one is dispatched behind the first.
    """

    def __init__(self, runner: ModelRunner, *, slice_ms: float, max_steps: int, ahead: bool):
        self._runner, self._ahead = runner, ahead
        # With two in flight a new request waits for both.
        self._pace = DecodePace(slice_ms / 2 if ahead else slice_ms, max_steps)
        self._first: DecodeLoop | None = None
        self._begun = 0.0
        # Else it is mostly the time of a compilation.
        self._is_timed = False
        self._had_room = True

    @property
    def in_flight(self) -> bool:
        """Whether anybody waits for the tokens of a loop."""
        if self._first is None:
            return False
        return any(request.finish_reason is None for request in self._first.requests)

    def num_steps(self, num_requests: int) -> int:
        """Steps of a loop with so many requests."""
        return self._pace.num_steps(num_requests)

    def start(self, requests: Sequence[Request], num_steps: int) -> None:
        """Dispatch a loop; its requests have room for so many tokens."""
        self._had_room = True
        num_programs, self._begun = self._runner.num_programs, time.perf_counter()
        self._first = self._runner.decode(requests, num_steps)
        self._is_timed = self._runner.num_programs == num_programs

    @contextmanager
    def landing(self, alone: Sequence[Request]) -> Iterator[tuple[Sequence[Request], Drawn]]:
        """Wait for the first loop, with another one behind it if `alone` are its requests.

        Args:
            alone: the running requests, or nothing if others are to come in.
        """
        loop, self._first = self._first, None
        assert loop is not None, "nothing is in flight"
        behind = self._runner.decode_behind(loop) if self._goes_on(loop, alone) else None
        drawn = self._runner.fetch(loop)
        now = time.perf_counter()
        num_steps = int((drawn.tokens >= 0).any(axis=1).sum())
        if num_steps and self._is_timed:
            self._pace.note(len(loop.requests), (now - self._begun) / num_steps)
        self._had_room = num_steps > 0
        yield loop.requests, drawn
        self._first, self._begun, self._is_timed = behind, now, True

    def _goes_on(self, loop: DecodeLoop, alone: Sequence[Request]) -> bool:
        return (
            self._ahead
            and self._had_room  # else room is made first
            and loop.after is not None
            and list(loop.requests) == list(alone)
            and any(n < r.max_computed for r, n in zip(loop.requests, loop.lens, strict=True))
        )


def schedules_ahead(config: EngineConfig) -> bool:
    """Whether decode loops are dispatched ahead: if not said, where the host is not the device."""
    if config.async_scheduling is None:
        return jax.default_backend() != "cpu"
    return config.async_scheduling
