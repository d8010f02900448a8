"""A server that ends in order: it refuses what comes, finishes what is here, then closes."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from .async_engine import AsyncEngine
from .console import err
from .output_stream import EngineFailed

_POLL_S = 0.05


class DrainingServer(uvicorn.Server):
    """Drains the engine when it is told to stop, while it still answers: new requests get a 503.

    Args:
        config: of uvicorn; its graceful shutdown begins when the engine is drained or the time
            is over.
        async_engine: what is drained, and closed.
        announcement: printed when connections are taken.
        shutdown_timeout: seconds that requests get to finish; those that have not get an error.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        async_engine: AsyncEngine,
        announcement: str,
        shutdown_timeout: float,
    ) -> None:
        super().__init__(config)
        self._async_engine = async_engine
        self._announcement = announcement
        self._shutdown_timeout = shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so once connections are taken."""
        await super().startup(sockets=sockets)
        if self.started:
            err.print(self._announcement, markup=False, soft_wrap=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests for a while; end the others with an error that says why; close."""
        draining = asyncio.ensure_future(self._async_engine.drain(self._shutdown_timeout))
        while not draining.done() and not self.force_exit:
            await asyncio.wait([draining], timeout=_POLL_S)
        draining.cancel()
        with contextlib.suppress(EngineFailed, asyncio.CancelledError):
            await draining
        await asyncio.to_thread(self._async_engine.close)
        await super().shutdown(sockets=sockets)
