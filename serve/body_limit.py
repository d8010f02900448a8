"""A limit on the size of request bodies, kept while they are read."""

from __future__ import annotations

from fastapi import HTTPException  # the subclass that FastAPI lets through while it reads
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16 * 2**20


class BodyLimit:
    """ASGI middleware: a body longer than `MAX_BODY_BYTES` ends in a 413, announced or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a `receive` that counts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        announced = int(length[:20]) if length.isdigit() else 0
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            if announced > MAX_BODY_BYTES:
                raise _too_large()
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, counted, send)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
