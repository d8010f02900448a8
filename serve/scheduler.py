"""Which requests run next: first come, first served, but nobody computes what another is at.

A waiting request whose prompt shares blocks with one that is being prefilled waits for those
blocks, because the leader is about to publish them and computing them twice is the one thing
this engine does not do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from .request import Request

# Requests behind this many others are not looked at: none of them could get a seat.
_LOOK_AHEAD = 4


class Scheduler:
    """The waiting and running requests.

    Attributes:
        waiting: requests without a seat, in order.
        running: requests with a seat, oldest first.
    """

    def __init__(self, *, num_seats: int, block_size: int, token_budget: int, share: bool):
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_seats = list(range(num_seats))[::-1]
        self._num_seats = num_seats
        self._block_size = block_size
        self._token_budget = token_budget
        self._share = share

    def candidates(self) -> Iterator[Request]:
        """Waiting requests that may start now, in order, as long as there are seats."""
        for request in list(self.waiting)[: _LOOK_AHEAD * self._num_seats]:
            if not self._free_seats:
                return
            if not self._follows(request):
                yield request

    def next_seat(self) -> int:
        """The seat that the next started request will take."""
        return self._free_seats[-1]

    def start(self, request: Request) -> None:
        """Move a waiting request to its seat."""
        self.waiting.remove(request)
        request.seat = self._free_seats.pop()
        self.running.append(request)

    def leave(self, request: Request) -> None:
        """Take a running request off its seat."""
        assert request.seat is not None
        self.running.remove(request)
        self._free_seats.append(request.seat)
        request.seat = None

    def prefill_work(self) -> list[tuple[Request, int]]:
        """(request, tokens) of the next packed step, or nothing if no request needs prefill.

        Every decoding request takes part with one token; chunks of prompts fill the budget.
        """
        prefills = [r for r in self.running if r.needs_prefill]
        if not prefills:
            return []
        work = [(r, 1) for r in self.running if not r.needs_prefill]
        budget = self._token_budget - len(work)
        for request in prefills:
            count = min(request.num_tokens - request.num_computed, budget)
            if count < 1:
                break
            work.append((request, count))
            budget -= count
        return work

    def _follows(self, request: Request) -> bool:
        """Whether a running request is about to compute blocks that this one shares."""
        if not self._share:
            return False
        size = self._block_size
        usable = (request.num_tokens - 1) // size
        for leader in self.running:
            if leader.namespace != request.namespace or not leader.needs_prefill:
                continue
            shared = min(_common_prefix(leader, request) // size, usable)
            if shared > leader.num_computed // size:
                return True
        return False


def _common_prefix(a: Request, b: Request) -> int:
    """Number of tokens that two requests share from the start."""
    length = min(a.num_tokens, b.num_tokens)
    different = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
    return int(different[0]) if different.size else length
