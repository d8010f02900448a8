"""What a task reads of its requests while the engine works on another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from .outputs import RequestOutput


class EngineFailed(RuntimeError):
    """The engine has stopped, by a failure or because it was closed; the message says which."""


class OutputStream:
    """The outputs of one or more requests, in the order in which the engine makes them.

    An async iterator of `RequestOutput`, to be read once, by one task, in the event loop that
    submitted. It ends when all its requests have finished and raises `EngineFailed` when the
    engine fails. `close` may be called at any time, from any thread.
    """

    def __init__(
        self,
        request_ids: tuple[str, ...],
        outputs: asyncio.Queue[RequestOutput | EngineFailed],
        cancel_fn: Callable[[Iterable[str]], None],
    ) -> None:
        self.request_ids = request_ids
        self._unfinished = set(request_ids)
        self._outputs = outputs
        self._cancel_fn = cancel_fn

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._outputs.get()
        if isinstance(item, EngineFailed):
            self._unfinished.clear()
            raise item
        if item.finished:
            self._unfinished.discard(item.request_id)
        return item

    def close(self) -> None:
        """Cancel whatever has not finished; does nothing after the end."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._cancel_fn(unfinished)

    def __del__(self) -> None:
        self.close()
