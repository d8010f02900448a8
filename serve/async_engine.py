"""The engine on a thread of its own, behind any number of asyncio tasks.

`Engine` is synchronous and not thread-safe. `AsyncEngine` owns the one thread that touches it:
everybody else queues a command, the thread carries the commands out between two steps and hands
the outputs to the event loop of whoever asked.

Invariants:
1. Only the engine thread calls the engine.
2. A request has a mailbox from the moment it is accepted until its last output, and never later.
3. A stream that is closed, dropped, or whose task is cancelled cancels its unfinished requests, so
   every block comes back whatever the consumer does.
4. After `step` has raised nothing runs any more: every outstanding request and every later call
   gets `EngineFailed`, which says why.

    async_engine = AsyncEngine(engine)
    stream = await async_engine.submit("Once upon a time", SamplingParams(max_tokens=20))
    with contextlib.closing(stream):
        async for output in stream:
            print(output.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ..models import LoadedModel
from ..paged import PinBudgetExceeded
from .beam_search import BeamSearchParams
from .engine import Engine
from .metrics import ServerMetrics
from .output_stream import EngineFailed, OutputStream
from .outputs import EngineStats, RequestOutput
from .refusals import QueueFull, RequestRefused
from .sampling_params import InvalidRequest, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DRAIN_POLL_S = 0.05
# What callers have to expect, and no fault of the engine's.
_REFUSALS = (InvalidRequest, RequestRefused, PinBudgetExceeded)


@dataclass(kw_only=True)
class _Mailbox:
    """Where the outputs of one live request go, and what has been seen of it so far."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | EngineFailed]
    submitted_at: float
    last: RequestOutput
    last_token_at: float | None = None


@dataclass(kw_only=True)
class _Command:
    run_fn: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class AsyncEngine:
    """Runs an `Engine` on its own thread and serves it to asyncio tasks of any event loop.

    Args:
        engine: the engine; from here on nobody else may call it until `close`.
        metrics: where latencies and finished requests are counted, if given.
    """

    def __init__(self, engine: Engine, *, metrics: ServerMetrics | None = None) -> None:
        self.config = engine.config
        self.max_model_len = engine.max_model_len
        self.metrics = metrics
        self._engine = engine
        self._grammars = engine.grammars
        self._mailboxes: dict[str, _Mailbox] = {}
        # SimpleQueue because its `put` may be interrupted by itself: a stream dropped by the
        # garbage collector posts its cancellation from wherever the collector happened to run.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._closing = self._draining = False
        self._end: str | None = None  # why the thread has ended
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def loaded(self) -> LoadedModel:
        """The model, its tokenizer and its chat template."""
        return self._engine.loaded

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests because it was told so."""
        return self._draining

    @property
    def failure(self) -> EngineFailed | None:
        """Why the engine no longer takes requests, or None while it does; a new one each time.

        An exception that is raised again grows: it collects the frames of all who raised it.
        """
        return None if self._end is None else EngineFailed(self._end)

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str | None = None,
    ) -> OutputStream:
        """Submit one request; its outputs come from the stream.

        Raises:
            InvalidRequest: the engine refused the request; nothing has changed.
            QueueFull: `max_waiting` requests wait; nothing has changed.
            EngineDraining: the engine takes no new requests.
            EngineFailed: the engine has stopped.
        """
        return await self.submit_all(
            [(prompt, params)], cache_salt=cache_salt, priority=priority, adapter=adapter
        )

    async def submit_all(
        self,
        requests: Sequence[tuple[str | Sequence[int], SamplingParams | BeamSearchParams]],
        *,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str | None = None,
    ) -> OutputStream:
        """Submit several prompts at once, all or none.

        The outputs' ids are in `stream.request_ids`: the answers to the first prompt, then those
        to the next.

        Raises: as `submit`.
        """
        submitted_at = time.perf_counter()
        prompts = await self._token_ids([prompt for prompt, _ in requests])
        await self._compile_grammars([p for _, p in requests if isinstance(p, SamplingParams)])
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | EngineFailed] = asyncio.Queue()
        stem = uuid.uuid4().hex
        groups = [
            [f"{stem}-{i}-{branch}" for branch in range(params.num_branches)]
            for i, (_, params) in enumerate(requests)
        ]
        request_ids = tuple(request_id for group in groups for request_id in group)

        def add() -> None:
            if self._engine.num_waiting >= self.config.max_waiting:
                raise QueueFull(
                    f"{self._engine.num_waiting} requests wait already; try again later"
                )
            for group, prompt, (_, params) in zip(groups, prompts, requests, strict=True):
                try:
                    self._engine.add_branches(
                        prompt,
                        params,
                        cache_salt=cache_salt,
                        priority=priority,
                        adapter=adapter,
                        request_ids=group,
                    )
                except BaseException:
                    self._cancel_now(request_ids)
                    raise
                for request_id in group:
                    nothing = _nothing_yet(request_id, len(prompt))
                    self._mailboxes[request_id] = _Mailbox(
                        loop=loop, queue=outputs, submitted_at=submitted_at, last=nothing
                    )

        # Made before the wait: if the waiting task is cancelled, dropping the stream cancels
        # requests that the engine has taken meanwhile.
        stream = OutputStream(request_ids, outputs, self._cancel_soon)
        try:
            await asyncio.wrap_future(self._post(add))
        except BaseException:
            stream.close()
            raise
        return stream

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; its stream gets a last output with finish_reason "cancelled".

        Returns whether there was such a request. Raises EngineFailed if the engine has stopped.
        """
        future = self._post(lambda: self._cancel_now([request_id]))
        return await asyncio.wrap_future(future) > 0

    async def stats(self) -> EngineStats:
        """The engine's counters, read between two steps. Raises EngineFailed if it has stopped."""
        return await self.run(lambda engine: engine.stats())

    async def run(self, engine_fn: Callable[[Engine], T]) -> T:
        """What a function of the engine returns, called between two steps; it may not step.

        Raises:
            EngineFailed: the engine has stopped.
        """
        return await asyncio.wrap_future(self._post(lambda: engine_fn(self._engine)))

    async def drain(self, timeout_s: float, *, cancel_waiting: bool = False) -> bool:
        """Take no new requests and wait for those that are here, at most so long.

        Returns whether all have finished. Raises EngineFailed if the engine has stopped.
        """
        self._draining = True
        begin_fn = partial(self._engine.begin_drain, cancel_waiting=cancel_waiting)
        await asyncio.wrap_future(self._post(lambda: self._hand_out(begin_fn())))
        until = time.monotonic() + timeout_s
        while self._mailboxes and time.monotonic() < until:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._mailboxes

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that requests may name now."""
        return self._engine.adapter_names

    def close(self) -> None:
        """Stop the thread; requests still running are cancelled and get `EngineFailed`."""
        with contextlib.suppress(EngineFailed):
            self._post(self._start_closing)
        self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # On the caller's side ------------------------------------------------------------------

    async def _token_ids(self, prompts: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        texts = {prompt for prompt in prompts if isinstance(prompt, str)}
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        encode_fn = self.loaded.tokenizer.encode
        # A long text takes long to tokenize: neither the event loop nor the engine waits for it.
        ids = await asyncio.to_thread(lambda: {text: encode_fn(text) for text in texts})
        return [ids[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _compile_grammars(self, params: Sequence[SamplingParams]) -> None:
        # Takes long too; the engine finds them compiled.
        for form in {id(p.structured_outputs): p.structured_outputs for p in params}.values():
            if form is not None:
                await asyncio.to_thread(self._grammars.start, self.loaded, form)

    def _post(self, run_fn: Callable[[], T]) -> Future[T]:
        if (failure := self.failure) is not None:
            raise failure
        command = _Command(run_fn=run_fn)
        self._commands.put(command)
        if self._end is not None:  # it stopped meanwhile and may have emptied the queue before
            self._refuse_commands()
        return command.future

    def _cancel_soon(self, request_ids: Iterable[str]) -> None:
        ids = tuple(request_ids)
        with contextlib.suppress(EngineFailed):  # nothing runs any more: nothing to cancel
            self._post(lambda: self._cancel_now(ids))

    def _refuse_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                future = self._commands.get_nowait().future
                if future.set_running_or_notify_cancel():
                    future.set_exception(self.failure)

    # On the engine thread ------------------------------------------------------------------

    def _run(self) -> None:
        end = "the engine has been shut down"
        try:
            while not self._closing:
                self._run_commands()
                if self._engine.num_unfinished and not self._closing:
                    self._hand_out(self._engine.step())
            for request_id in self._mailboxes:
                self._engine.cancel(request_id)
        except BaseException as error:  # a thread that died silently would hang every client
            logger.exception("the engine failed; no more requests are taken")
            reason = f"{type(error).__name__}: {error}"
            end = f"the engine failed and must be restarted: {reason[:500]}"
        self._stop(end)

    def _run_commands(self) -> None:
        """Carry out what is queued; without any work, sleep until something is."""
        with contextlib.suppress(queue.Empty):
            while not self._closing:
                self._execute(self._commands.get(block=not self._engine.num_unfinished))

    def _execute(self, command: _Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.run_fn())
        except _REFUSALS as error:
            command.future.set_exception(error)
        except Exception as error:
            logger.exception("an engine command failed")
            command.future.set_exception(error)

    def _start_closing(self) -> None:
        self._closing = True

    def _cancel_now(self, request_ids: Iterable[str]) -> int:
        cancelled = []
        for request_id in request_ids:
            if (mailbox := self._mailboxes.get(request_id)) is None:
                continue
            self._engine.cancel(request_id)
            last = _nothing_yet(request_id, mailbox.last.num_prompt_tokens)
            cancelled.append(
                replace(
                    last,
                    finish_reason="cancelled",
                    num_cached_tokens=mailbox.last.num_cached_tokens,
                    num_generated_tokens=mailbox.last.num_generated_tokens,
                )
            )
        self._hand_out(cancelled)
        return len(cancelled)

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        now = time.perf_counter()
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Any]]]
        by_loop = defaultdict(list)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue  # cancelled while the step ran
            self._count(mailbox, output, now)
            mailbox.last = output
            if output.finished:
                del self._mailboxes[output.request_id]
            by_loop[mailbox.loop].append((mailbox.queue, output))
        # One wake-up per event loop and step, however many requests advanced.
        for loop, batch in by_loop.items():
            self._send(loop, batch)

    def _send(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue, Any]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # the loop is closed: nobody can read, so nothing may go on
            orphans = [i for i, mailbox in self._mailboxes.items() if mailbox.loop is loop]
            for request_id in orphans:
                del self._mailboxes[request_id]
                self._engine.cancel(request_id)

    def _count(self, mailbox: _Mailbox, output: RequestOutput, now: float) -> None:
        num_tokens = len(output.token_ids)
        previous, since_submit = mailbox.last_token_at, now - mailbox.submitted_at
        if num_tokens:
            mailbox.last_token_at = now
        if self.metrics is None:
            return
        if num_tokens and previous is None:
            self.metrics.first_token(since_submit)
        elif num_tokens and previous is not None:
            self.metrics.more_tokens(num_tokens, now - previous)
        if output.finish_reason is not None:
            self.metrics.request_finished(output.finish_reason, since_submit)

    def _stop(self, end: str) -> None:
        self._end = end
        self._refuse_commands()
        mailboxes, self._mailboxes = self._mailboxes, {}
        # Streams of several requests share a queue: one failure each is enough to end them.
        queues = {id(m.queue): (m.loop, m.queue) for m in mailboxes.values()}
        for loop, outputs in queues.values():
            self._send(loop, [(outputs, EngineFailed(end))])


def _put_all(batch: list[tuple[asyncio.Queue, Any]]) -> None:
    for outputs, item in batch:
        outputs.put_nowait(item)


def _nothing_yet(request_id: str, num_prompt_tokens: int) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        text="",
        token_ids=(),
        finish_reason=None,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        num_generated_tokens=0,
    )
