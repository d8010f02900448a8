"""Requests that wait for blocks from a lower tier, and go on computing where those end.

A request whose prompt goes on below the device, and for which restoring is sooner than computing
(see `restore_choice`), gets its seat and all its blocks like any other, and
holds them. Threads read the missing ones into host memory, a few batches ahead; between two steps
what has been read is put into the request's blocks and published, as if it had been computed: it is
found by others, those who wait for its blocks go on, and whatever ends the request early leaves
nothing behind. Where a block turns out to be missing, the request computes from there. Where the
first blocks are computed by choice, those after them are put in place meanwhile.

Others decode meanwhile. Per step restores take at most the time of a slice of decode steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import jax

from .loads import Load, Restore, Watch
from .request import Request
from .restore_choice import RestoreChoice
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
        choice: decides what is restored.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        block_size: int,
        slice_s: float,
        count: dict[str, int],
        choice: RestoreChoice,
    ):
        self.choice = choice
        self._runner = runner
        self._block_size = block_size
        self._slice_s = slice_s
        self._count = count
        self._num_loads = 0
        # Those who compute what they could have restored.
        self._watched: list[tuple[Request, Watch]] = []

    def begin(self, request: Request, *, is_first: bool, may_split: bool = True) -> None:
        """Look up what follows a request's cached blocks; `request.restore` is set if any of it
        is to come from there.

        Args:
            request: has its seat and its blocks.
            is_first: whether it is here for the first time.
            may_split: whether it can compute some blocks and then get those that follow.
        """
        tiers, size = self._runner.tiers, self._block_size
        if tiers is None or request.scores_prompt:
            return
        first, end = request.num_computed // size, (request.num_tokens - 1) // size
        keys = tiers.keys_of(request, end)[:end]
        found = tiers.stack.nearest(keys[first:])
        if is_first:
            self._count["external_query_tokens"] += (end - first) * size
        used = keys[: first + len(found)]
        if not found:
            tiers.stack.touch(used)
            return
        start, stop, watch = self.choice.choose(first * size, found, may_split=may_split)
        start, stop = first + start, first + stop
        if not first == start < stop:
            tiers.stack.touch(used)
            used = []  # what is waited for at once is told while it is copied
        if start == stop or stop * size < watch.stop_token:
            self._watched.append((request, watch))
        if start < stop:
            request.restore = Restore(
                keys=keys[:stop],
                used=used,
                start_token=start * size,
                next=start,
                ready=start,
                is_first=is_first,
                watch=watch,
            )
            self._read_ahead([request])

    def end(self, request: Request) -> None:
        """Give up what a request has not got yet, if anything."""
        self._look_at_watched()
        self._watched = [(other, watch) for other, watch in self._watched if other is not request]
        self._stop(request)

    def _stop(self, request: Request) -> None:
        self._break_off(request)
        request.restore = None

    def _break_off(self, request: Request) -> None:
        """Let a request have what is in place, and no more."""
        restore = request.restore
        if restore is not None:
            restore.is_over = True
            self._num_loads -= len(restore.loads)
            for load in restore.loads:
                load.future.cancel()
            restore.loads.clear()

    def advance(
        self, running: Sequence[Request], publish_fn: Callable[[Request], None], *, idle: bool
    ) -> None:
        """Put what has been read where it belongs.

        Args:
            running: the requests that have seats.
            publish_fn: lets others find what a request has got.
            idle: whether nobody has anything to compute; then it waits, until somebody has.
        """
        self._look_at_watched()
        restoring = [request for request in running if request.restore is not None]
        for request in restoring:
            assert request.restore is not None
            request.restore.watch.alone &= idle
        try:
            self._put_what_is_read(restoring, idle=idle)
        finally:
            try:
                # Only now: the host notes blocks while the device still copies them.
                for request in restoring:
                    self._go_on(request, publish_fn)
            finally:
                if restoring and self._runner.tiers is not None:
                    self._runner.tiers.settle()

    def _put_what_is_read(self, restoring: Sequence[Request], *, idle: bool) -> None:
        until = time.perf_counter() + self._slice_s
        rows: dict[Request, jax.Array] = {}
        self._read_ahead(restoring)
        while restoring:
            ready = [request for request in restoring if _is_ready(request)]
            for request in ready:
                try:
                    self._take(request, rows)
                except BaseException:
                    # An interrupt, perhaps before the blocks were there: those that follow them
                    # are of no use.
                    self._break_off(request)
                    raise
            left = [request for request in restoring if not _is_over(request)]
            self._read_ahead(left)
            seconds = until - time.perf_counter()
            if seconds <= 0 or (not idle and not ready) or (idle and len(left) < len(restoring)):
                return
            restoring = left
            if not ready:
                loads = [request.restore.loads for request in restoring if request.restore]
                futures = [some[0].future for some in loads if some]
                wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)

    def _look_at_watched(self) -> None:
        """Note what has been computed by choice."""
        done = [w for request, w in self._watched if request.num_computed >= w.stop_token]
        for watch in done:
            self.choice.carried_out(watch)
        if done:
            self._watched = [(request, w) for request, w in self._watched if w not in done]

    def _read_ahead(self, restoring: Sequence[Request]) -> None:
        """Let more be read; at least one batch for everybody, so that nobody waits for ever."""
        tiers, size = self._runner.tiers, self._block_size
        for request in restoring:
            restore = request.restore
            assert tiers is not None and restore is not None
            while (
                not restore.is_over
                and restore.next < len(restore.keys)
                and (not restore.loads or self._num_loads < _MAX_LOADS)
            ):
                first = restore.next
                keys = restore.keys[first : first + tiers.most_blocks]
                tokens = request.tokens[first * size :][: len(keys) * size].reshape(-1, size)
                count, future = tiers.load(keys, tokens)
                restore.next = first + count
                restore.loads.append(Load(first=first, end=restore.next, future=future))
                self._num_loads += 1

    def _take(self, request: Request, rows: dict[Request, jax.Array]) -> None:
        """Put the next batch in place, if there is one; `rows` are requests' tables."""
        restore = request.restore
        assert restore is not None
        if not restore.loads:
            return
        load = restore.loads[0]
        try:
            loaded = load.future.result()
        except Exception:  # memory, say: computing is always possible
            logger.exception("blocks of request %s could not be read", request.request_id)
            loaded = None
        restore.loads.popleft()
        self._num_loads -= 1
        if loaded is not None and loaded.count:
            if request not in rows:
                rows[request] = self._runner.table_row(request)
            count = self._runner.put_blocks(rows[request], load.first, loaded)
            restore.ready = load.first + count
        restore.is_over = restore.ready < load.end or load.end == len(restore.keys)

    def _go_on(self, request: Request, publish_fn: Callable[[Request], None]) -> None:
        """Let a request go on after what is in place, and others find it."""
        restore = request.restore
        if restore is None or not request.waits_for_blocks:
            return
        if restore.used and self._runner.tiers is not None:
            self._runner.tiers.stack.touch(restore.used)
            restore.used = ()
        gained = restore.ready * self._block_size - request.num_computed
        if gained > 0:
            request.num_computed += gained
            publish_fn(request)
            if restore.is_first:
                request.num_cached_tokens = (request.num_cached_tokens or 0) + gained
                self._count["prefix_hit_tokens"] += gained
                self._count["external_hit_tokens"] += gained
        if restore.is_over:
            self._stop(request)
            if request.num_computed >= restore.watch.stop_token:
                self.choice.carried_out(restore.watch)


def _is_ready(request: Request) -> bool:
    """Whether there is something to put in place, or nothing more to wait for."""
    restore = request.restore
    assert restore is not None
    if restore.loads:
        return restore.loads[0].future.done()
    return restore.is_over and request.waits_for_blocks


def _is_over(request: Request) -> bool:
    """Whether all is in place that is to come, and the request can go on."""
    assert request.restore is not None
    return request.restore.is_over and request.waits_for_blocks
