"""Which requests run next, and that everybody's turn comes.

Waiting requests start in the order of a policy: `fcfs` by arrival, `priority` by the value that
came with them (the lowest first), `lpm` by how much of them is cached (the longest match first).
Two rules hold under all three.

* *Ageing.* Whoever has been set back `max_setbacks` times is *overdue*: nobody that arrived later
  starts before it or takes its blocks. A setback is a later request, or beam search, that starts
  while this one waits, also while it waits for a leader, or a preemption. So nobody is set back
  more often than that, and the first overdue request runs to its end.
* *No thrash.* Once somebody was preempted or found no blocks, nobody starts until another ends:
  those that run need what is free. Excepted is who fits beside them however long all get. So
  between two ends every request is preempted at most once. (Under `priority` a request pushes out
  running ones of lower priority; each time they are set back, so that ends as well.)

Nobody computes what another is at: a waiting request whose prompt shares blocks with one that is
being prefilled waits for those blocks, because the leader is about to publish them and computing
them twice is the one thing this engine does not do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest

import numpy as np

from .branching import waits_for_prompt
from .request import Request
from .sampling_params import InvalidRequest

POLICIES = ("fcfs", "priority", "lpm")
# Requests behind this many others for each seat are not looked at: none of them could get one.
_LOOK_AHEAD = 4


class Scheduler:
    """The waiting and running requests.

    Args:
        policy: one of `POLICIES`.
        max_setbacks: times that a request is set back before it is overdue.
        num_seats: requests that run at once.
        num_blocks: blocks that running requests can have together.
        block_size: B.
        token_budget: tokens of one packed step.
        share: whether prefixes are cached.
        cached_lens_fn: cached tokens at the start of each request, asked under `lpm`.
        most_matched: requests that it takes, at most.

    Attributes:
        waiting: requests without a seat, by arrival.
        running: requests with a seat, in the order in which they got it.
    """

    def __init__(
        self,
        *,
        policy: str,
        max_setbacks: int,
        num_seats: int,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        share: bool,
        cached_lens_fn: Callable[[Sequence[Request]], Sequence[int]],
        most_matched: int,
    ):
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._policy = policy
        self._max_setbacks = max_setbacks
        self._free_seats = list(range(num_seats))[::-1]
        self._look_ahead = _LOOK_AHEAD * num_seats
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._token_budget = token_budget
        self._share = share
        self._cached_lens_fn = cached_lens_fn
        self._most_matched = most_matched
        # Blocks are short: see "no thrash" above.
        self._crowded = False
        # Somebody has become overdue since the candidates were put in order.
        self._order_changed = False

    # ---- who waits and who runs --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait, behind those that arrived before it."""
        insort(self.waiting, request, key=_arrival)

    def start(self, request: Request) -> None:
        """Move a waiting request to its seat."""
        self.waiting.remove(request)
        self.set_back(request.number)
        request.seat = self._free_seats.pop()
        self.running.append(request)

    def set_back(self, number: int) -> None:
        """Note that what came as this number has started: who came before and waits is set back."""
        for other in self.waiting:
            if other.number > number:
                break
            other.num_setbacks += 1
            self._order_changed |= other.num_setbacks == self._max_setbacks

    def preempt(self, request: Request) -> None:
        """Move a running request back to those that wait."""
        self._leave(request)
        self._crowded = True
        # An overdue one makes room only for overdue ones that arrived before it.
        request.num_setbacks += not self._is_overdue(request)
        self.add(request)

    def end(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request.seat is None:
            self.waiting.remove(request)
        else:
            self._leave(request)
            self._crowded = False

    def _leave(self, request: Request) -> None:
        assert request.seat is not None
        self.running.remove(request)
        self._free_seats.append(request.seat)
        request.seat = None

    # ---- whose turn it is --------------------------------------------------------------------

    def candidates(self) -> Iterator[Request]:
        """Waiting requests that may start now, in order, as long as there is room.

        Whoever is yielded has started when the next one is asked for.
        """
        if not self.someone_may_start:
            return
        self._order_changed = False
        for request in self._in_order():
            if self._order_changed or not self._has_room_for(request):
                return
            if not waits_for_prompt(request) and not self._follows(request):
                yield request
            elif self._is_overdue(request):
                return

    @property
    def someone_may_start(self) -> bool:
        """Whether anybody waits for whom there is a seat, or may be."""
        return bool(self.waiting) and bool(self._free_seats or self._someone_pushes())

    def refuse(self) -> None:
        """There are no blocks for the last candidate, and so for nobody until another ends."""
        self._crowded = True

    def may_join(self, request: Request) -> bool:
        """Whether a request may start out of turn, beside the one that computes its prompt."""
        free = bool(self._free_seats) and self._has_room_for(request)
        return free and self.may_pass(request.number)

    def may_pass(self, number: int) -> bool:
        """Whether what came as this number may start though others wait: none is overdue."""
        return not any(self._is_overdue(r) and r.number < number for r in self.waiting)

    def next_seat(self) -> int | None:
        """The seat that the next started request will take, or None."""
        return self._free_seats[-1] if self._free_seats else None

    def victim(self) -> Request:
        """The running request whose turn it is least, to make room for the others."""
        return max(self.running, key=self._rank)

    def victim_for(self, request: Request) -> Request | None:
        """The running request that makes room for a waiting one of higher priority, if any."""
        if self._policy != "priority" or not self.running:
            return None
        victim = self.victim()
        # It is set back twice: by the preemption, and when the other one starts.
        pushed = victim.num_setbacks + 2 <= self._max_setbacks
        return victim if pushed and victim.priority > request.priority else None

    def _someone_pushes(self) -> bool:
        if self._policy != "priority":
            return False
        return self.victim_for(min(self.waiting, key=lambda r: r.priority)) is not None

    def _has_room_for(self, request: Request) -> bool:
        """Whether a request could start, as far as seats and running requests go."""
        if self._free_seats and (not self._crowded or self._fits_to_the_end(request)):
            return True
        return self.victim_for(request) is not None

    def _fits_to_the_end(self, request: Request) -> bool:
        """Whether the cache holds this one and all that run, however long they get."""
        if not self.running:
            return True
        lens = (r.max_computed for r in [request, *self.running])
        return sum(-(-length // self._block_size) for length in lens) <= self._num_blocks

    def _in_order(self) -> list[Request]:
        if self._policy == "fcfs":
            return self.waiting[: self._look_ahead]
        if (
            self._policy == "priority"
            or self._crowded
            or len(self.waiting) <= len(self._free_seats)
        ):
            return nsmallest(self._look_ahead, self.waiting, key=self._rank)
        first = nsmallest(self._most_matched, self.waiting, key=self._rank)
        lens = dict(zip(first, self._cached_lens_fn(first), strict=True))
        return sorted(first, key=lambda request: self._rank(request, -lens[request]))

    def _rank(self, request: Request, value: int = 0) -> tuple[bool, int, int]:
        """Sorts by turn: who is overdue, then by value or priority, then by arrival."""
        overdue = self._is_overdue(request)
        value = request.priority if self._policy == "priority" else value
        return not overdue, 0 if overdue else value, request.number

    def _is_overdue(self, request: Request) -> bool:
        return request.num_setbacks >= self._max_setbacks

    def _follows(self, request: Request) -> bool:
        """Whether a running request is about to compute blocks that this one shares."""
        if not self._share or request.scores_prompt:
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

    # ---- what a step computes ----------------------------------------------------------------

    @property
    def computing(self) -> list[Request]:
        """Running requests that do not wait for blocks from a lower tier."""
        return [request for request in self.running if not request.waits_for_blocks]

    def prefill_work(self) -> list[tuple[Request, int]]:
        """(request, tokens) of the next packed step, or nothing if no request needs prefill.

        Every decoding request takes part with one token; chunks of prompts fill the budget.
        """
        prefills = [r for r in self.computing if r.needs_prefill]
        if not prefills:
            return []
        work = [(r, 1) for r in self.computing if not r.needs_prefill]
        budget = self._token_budget - len(work)
        for request in prefills:
            count = min(request.num_to_compute, budget)
            if count < 1:
                break
            work.append((request, count))
            budget -= count
        return work


def check_priority(priority: int, policy: str) -> None:
    """Raise `InvalidRequest` for a priority that would not be heeded."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"{priority=} must be an integer", param="priority")
    if priority and policy != "priority":
        raise InvalidRequest(
            f"{priority=} needs the scheduling policy 'priority'; this engine has {policy!r}",
            param="priority",
        )


def _arrival(request: Request) -> int:
    return request.number


def _common_prefix(a: Request, b: Request) -> int:
    """Number of tokens that two requests share from the start."""
    length = min(a.num_tokens, b.num_tokens)
    different = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
    return int(different[0]) if different.size else length
