"""When requests run out of time."""

from __future__ import annotations

import heapq
import time

from .request import Request


class Deadlines:
    """The requests that have a `timeout_s`, by the time at which it is over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._live: set[Request] = set()

    def add(self, request: Request) -> None:
        """Start the clock of a request, if it has one."""
        seconds = request.params.timeout_s
        if seconds is not None:
            heapq.heappush(self._heap, (time.monotonic() + seconds, request.number, request))
            self._live.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._live.discard(request)
        while self._heap and self._heap[0][2] not in self._live:
            heapq.heappop(self._heap)

    def passed(self) -> list[Request]:
        """The requests whose time is over; the caller ends them."""
        late: list[Request] = []
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request in self._live:
                late.append(request)
        return late
