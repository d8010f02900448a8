"""Requests that wait for blocks from a lower tier, and go on computing where those end.

A request whose prompt goes on below the device gets its seat and all its blocks like any other, and
holds them. Threads read the missing ones into host memory, a few batches ahead; between two steps
what has been read is put into the request's blocks and published, as if it had been computed: it is
found by others, those who wait for its blocks go on, and whatever ends the request early leaves
nothing behind. Where a block turns out to be missing, the request computes from there.

Others decode meanwhile. Per step restores take at most the time of a slice of decode steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from .loads import Load, Restore
from .request import Request
from .runner import ModelRunner

logger = logging.getLogger(__name__)

# Batches that are being read, or wait to be put into the cache, of all requests together.
_MAX_LOADS = 8


class Restores:
    """The restores of an engine.

    Args:
        runner: the device's side, with lower tiers or without.
        block_size: B.
        slice_s: seconds that `advance` may take.
        count: the engine's counters.
    """

    def __init__(
        self, runner: ModelRunner, *, block_size: int, slice_s: float, count: dict[str, int]
    ):
        self._runner = runner
        self._block_size = block_size
        self._slice_s = slice_s
        self._count = count
        self._num_loads = 0

    def begin(self, request: Request, *, is_first: bool) -> None:
        """Look up what follows a request's cached blocks; `request.restore` is set if it does."""
        tiers, size = self._runner.tiers, self._block_size
        if tiers is None or request.scores_prompt:
            return
        first, end = request.num_computed // size, (request.num_tokens - 1) // size
        keys = tiers.keys_of(request, end)[:end]
        found = tiers.stack.num_held(keys[first:])
        tiers.stack.touch(keys[: first + found])
        if is_first:
            self._count["external_query_tokens"] += (end - first) * size
        if found:
            keys = keys[: first + found]
            request.restore = Restore(keys=keys, next=first, is_first=is_first)
            self._read_ahead([request])

    def end(self, request: Request) -> None:
        """Give up what a request has not got yet, if anything."""
        restore, request.restore = request.restore, None
        if restore is not None:
            self._num_loads -= len(restore.loads)
            for load in restore.loads:
                load.future.cancel()

    def advance(
        self, running: Sequence[Request], publish_fn: Callable[[Request], None], *, idle: bool
    ) -> None:
        """Put what has been read where it belongs.

        Args:
            running: the requests that have seats.
            publish_fn: lets others find what a request has got.
            idle: whether nobody has anything to compute; then it waits, until somebody has.
        """
        until = time.perf_counter() + self._slice_s
        restoring = [request for request in running if request.restore is not None]
        self._read_ahead(restoring)
        while restoring:
            ready = [request for request in restoring if self._next_load(request).future.done()]
            for request in ready:
                try:
                    self._take(request, publish_fn)
                except BaseException:
                    # An interrupt, perhaps before the blocks were there: those that follow them
                    # are of no use.
                    self.end(request)
                    raise
            left = [request for request in restoring if request.restore is not None]
            self._read_ahead(left)
            seconds = until - time.perf_counter()
            if seconds <= 0 or (not idle and not ready) or (idle and len(left) < len(restoring)):
                return
            restoring = left
            if not ready:
                futures = [self._next_load(request).future for request in restoring]
                wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)

    def _next_load(self, request: Request) -> Load:
        assert request.restore is not None
        return request.restore.loads[0]

    def _read_ahead(self, restoring: Sequence[Request]) -> None:
        """Let more be read; at least one batch for everybody, so that nobody waits for ever."""
        tiers, size = self._runner.tiers, self._block_size
        for request in restoring:
            restore = request.restore
            assert tiers is not None and restore is not None
            while restore.next < len(restore.keys) and (
                not restore.loads or self._num_loads < _MAX_LOADS
            ):
                first, end = restore.next, min(restore.next + tiers.batch_blocks, len(restore.keys))
                tokens = request.tokens[first * size : end * size].reshape(end - first, size)
                future = tiers.load(restore.keys[first:end], tokens)
                restore.loads.append(Load(first=first, end=end, future=future))
                restore.next = end
                self._num_loads += 1

    def _take(self, request: Request, publish_fn: Callable[[Request], None]) -> None:
        restore, load = request.restore, self._next_load(request)
        assert restore is not None
        try:
            blocks, sources = load.future.result()
        except Exception:  # memory, say: computing is always possible
            logger.exception("blocks of request %s could not be read", request.request_id)
            self.end(request)
            return
        restore.loads.popleft()
        self._num_loads -= 1
        if sources:
            self._runner.put_blocks(request, load.first, len(sources), blocks)
            gained = (load.first + len(sources)) * self._block_size - request.num_computed
            request.num_computed += gained
            publish_fn(request)
            if restore.is_first:
                request.num_cached_tokens = (request.num_cached_tokens or 0) + gained
                self._count["prefix_hit_tokens"] += gained
                self._count["external_hit_tokens"] += gained
        if load.first + len(sources) < load.end or load.end == len(restore.keys):
            self.end(request)
