"""The connection to a Valkey or Redis server: short timeouts, no second tries, no secrets told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from redis import Redis

_CONNECT_SECONDS = 1.0
# Without a byte from the server, or for one block on its way there.
_SOCKET_SECONDS = 2.0
_FORM = (
    "a remote cache's URL must be redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss://… (for TLS) "
    "or unix:///PATH, with options of the client redis after a '?'; the one given is not repeated "
    "here, since it may hold a password"
)


def connect(url: str) -> tuple[Redis, str]:
    """A client, which connects when it is first used, and what may be told of where.

    Raises:
        ImportError: the client is not installed.
        ValueError: no URL of a server.
    """
    try:
        from redis import Connection, ConnectionPool, Redis, UnixDomainSocketConnection
        from redis.connection import parse_url
    except ModuleNotFoundError as error:
        raise ImportError(
            f"a remote cache needs {error.name}; install it with: pip install 'octavo[remote]'",
            name=error.name,
        ) from error
    own = {
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_timeout": _SOCKET_SECONDS,
        "retry": None,  # waiting is not for the client to decide
        "retry_on_error": [],
        "decode_responses": False,
        "protocol": 2,  # any server speaks it, and it takes one greeting less
        "driver_info": None,
    }
    try:
        options = parse_url(url) | own
        kind = options.pop("connection_class", Connection)
        is_unix = kind is UnixDomainSocketConnection
        path = urlsplit(url).path
        # The client would take another number for no number, and an empty path for one.
        if not (path if is_unix else re.fullmatch(r"/?\d*", path)):
            raise ValueError(path)
        connection = kind(**options)  # an option it does not know is a TypeError
    except (TypeError, ValueError):
        raise ValueError(_FORM) from None
    where = dict(connection.repr_pieces())
    place = where["path"] if is_unix else f"{where['host']}:{where['port']}"
    return Redis.from_pool(ConnectionPool(kind, **options)), f"{place}/{where['db']}"


def is_refusal(error: Exception) -> bool:
    """Whether a server is there and does not want what it was asked."""
    from redis import ResponseError

    return isinstance(error, ResponseError)
