"""Why an engine does not take a request that it could serve at another time."""

from __future__ import annotations


class RequestRefused(RuntimeError):
    """The request is fine, but not now; nothing has changed."""


class QueueFull(RequestRefused):
    """`max_waiting` requests wait already: try again later."""


class EngineDraining(RequestRefused):
    """The engine was told to take no new requests."""
