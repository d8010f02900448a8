"""How much of a KV cache's memory holds keys and values: reserved in one piece, and paged.

Requests with the lengths of real conversations go through a pool that is always wanted by more of
them than it holds; a step gives each running one a token. Before paging a request got its memory
in one piece when it started: for the longest there may be (`max`), for its prompt and its output
rounded up to a power of two (`pow2`), or for what it really comes to, which nobody can know
(`oracle`). A buddy allocator hands out those pieces, as Kwon et al. assume of Orca. Paged is the
block manager of this project: blocks are taken as they are needed, and when none is left the
youngest request gives back its own and starts again later.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.paged import BlockManager, OutOfBlocks

LENGTHS = Path(__file__).with_name("conversation_lengths.json")
# Prompts are cut to this part of their length: to what models could hold when the published
# figures were measured. Outputs stay as they are.
PROMPT_PART = 64
MAX_LEN = 2048
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request: tokens of its prompt, and of what will be generated."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(kw_only=True, eq=False)
class _Running:
    job: Job
    done: int = 0  # tokens generated
    place: int = 0  # offset of its piece, or its seat
    size: int = 0  # slots of its piece

    @property
    def tokens(self) -> int:
        return self.job.prompt + self.done


def read_jobs(count: int) -> list[Job]:
    """The first `count` requests of the committed lengths, none longer than `MAX_LEN` in all."""
    pairs = np.array(json.loads(LENGTHS.read_text())["lengths"]).reshape(-1, 2).tolist()
    jobs = []
    for prompt, output in pairs[:count]:
        prompt = min(max(prompt // PROMPT_PART, 1), MAX_LEN - 1)
        jobs.append(Job(prompt=prompt, output=min(output, MAX_LEN - prompt)))
    return jobs


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()


RESERVATIONS: dict[str, Callable[[Job], int]] = {
    "max": lambda job: MAX_LEN,
    "pow2": lambda job: min(job.prompt + power_of_two(job.output), MAX_LEN),
    "oracle": lambda job: job.total,
}


class Buddies:
    """Pieces of memory whose sizes are powers of two; halves of a piece that are free are one.

    Args:
        num_slots: a power of two.
    """

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._free: dict[int, set[int]] = {num_slots: {0}}  # offsets by size

    def take(self, num_slots: int) -> tuple[int, int] | None:
        """Offset and size of a piece of at least so many slots, or None."""
        wanted = power_of_two(num_slots)
        size = wanted
        while size <= self._num_slots and not self._free.get(size):
            size *= 2
        if size > self._num_slots:
            return None
        offset = min(self._free[size])
        self._free[size].remove(offset)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(offset + size)
        return offset, size

    def give_back(self, offset: int, size: int) -> None:
        """Give back a piece."""
        while size < self._num_slots and offset ^ size in self._free.get(size, ()):
            self._free[size].remove(offset ^ size)
            offset, size = offset & ~size, size * 2
        self._free.setdefault(size, set()).add(offset)


class _Shares:
    """Mean shares of a pool over the steps of a run."""

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._sums = np.zeros(4)
        self._steps = 0
        self._batch = 0

    def note(self, running: Sequence[_Running], reserved: float, internal: float) -> None:
        used = sum(r.tokens for r in running)
        rest = self._num_slots - used - reserved - internal
        self._sums += np.array([used, reserved, internal, rest]) / self._num_slots
        self._steps += 1
        self._batch += len(running)

    def means(self) -> dict[str, float]:
        names = ("used", "reserved", "internal", "external")
        shares = (self._sums / self._steps).tolist()
        return {**dict(zip(names, shares, strict=True)), "mean_batch": self._batch / self._steps}


def run_contiguous(
    jobs: Sequence[Job], num_slots: int, reserve: Callable[[Job], int]
) -> dict[str, float]:
    """Mean shares of the pool, and the mean batch, while requests wait.

    Args:
        jobs: the requests, in order.
        num_slots: of the pool, a power of two.
        reserve: slots that a request gets.

    Returns:
        `used` holds tokens, `reserved` will, `internal` is given to a request that will not use
        it, `external` is given to nobody or lost to rounding.
    """
    pool, waiting, running = Buddies(num_slots), deque(jobs), []
    shares = _Shares(num_slots)
    while waiting:
        while waiting and (piece := pool.take(reserve(waiting[0]))) is not None:
            running.append(_Running(job=waiting.popleft(), place=piece[0], size=piece[1]))
        if not waiting:
            break
        reserved = sum(r.job.total - r.tokens for r in running)
        shares.note(running, reserved, sum(reserve(r.job) - r.job.total for r in running))
        for r in running:
            r.done += 1
        for r in [r for r in running if r.done == r.job.output]:
            running.remove(r)
            pool.give_back(r.place, r.size)
    return shares.means()


def run_paged(jobs: Sequence[Job], num_slots: int) -> dict[str, float]:
    """As `run_contiguous`, in a block manager: `internal` is in a sequence's last block.

    Raises:
        AssertionError: the manager holds other blocks than the sequences need.
    """
    num_blocks, columns = num_slots // BLOCK_SIZE, MAX_LEN // BLOCK_SIZE
    num_seats = min(len(jobs), num_blocks)
    manager = BlockManager(
        num_blocks=1 + num_blocks,
        block_size=BLOCK_SIZE,
        num_seqs=num_seats,
        blocks_per_seq=columns,
    )
    seats = list(range(num_seats))[::-1]
    waiting = deque(_Running(job=job) for job in jobs)
    running: list[_Running] = []
    shares, crowded = _Shares(num_slots), False

    def stop(r: _Running) -> None:
        manager.release(r.place)
        seats.append(r.place)
        running.remove(r)

    while waiting:
        while waiting and seats and not crowded:
            try:
                manager.admit(seats[-1], [0] * waiting[0].tokens)
            except OutOfBlocks:
                break
            waiting[0].place = seats.pop()
            running.append(waiting.popleft())
        if not waiting:
            break
        needed = sum(-(-r.tokens // BLOCK_SIZE) for r in running)
        assert int(manager.stats().num_active) == needed
        shares.note(running, 0, needed * BLOCK_SIZE - sum(r.tokens for r in running))
        for r in running:
            r.done += 1
        for r in [r for r in running if r.done == r.job.output]:
            stop(r)
            crowded = False
        while growing := {r.place: r.tokens for r in running if r.tokens % BLOCK_SIZE == 1}:
            try:
                manager.append(growing)
                break
            except OutOfBlocks:
                waiting.appendleft(running[-1])
                stop(running[-1])
                crowded = True  # until somebody ends
    return shares.means()


def measure_waste(num_jobs: int, num_slots: int) -> dict[str, dict[str, float]]:
    """Shares of a pool of `num_slots`, a power of two, by how memory is given out."""
    jobs = read_jobs(num_jobs)
    found = {
        name: run_contiguous(jobs, num_slots, reserve) for name, reserve in RESERVATIONS.items()
    }
    return {**found, "paged": run_paged(jobs, num_slots)}
