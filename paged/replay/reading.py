"""Reads request logs: Mooncake's traces, and one's own with the tokens of every prompt.

A log is a file of JSON lines, one request each, in one of two forms:

- Mooncake's: `{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}`,
  where an id stands for 512 tokens. Every id counts as a block that can be reused, the last one
  too when the prompt ends within it, because the ids say nothing of what is in it.
- With tokens: `{"tokens": [1, 2, 3, ...]}`, where only full blocks can be reused; also
  `"namespace"` and `"cache_salt"` (requests share only if both are equal).

`"timestamp"` and `"output_length"` are optional in both. Timestamps order the requests; without
them the order is that of the lines. Answers are not replayed: their blocks count when a later
prompt holds them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .trace import Trace, TraceBuilder

MOONCAKE_BLOCK_SIZE = 512

_MAX_INT32 = 2**31 - 1
_COMMON_KEYS = ("timestamp", "output_length")
_MOONCAKE_KEYS = ("hash_ids", "input_length", *_COMMON_KEYS)
_TOKENS_KEYS = ("tokens", "namespace", "cache_salt", *_COMMON_KEYS)


class TraceError(ValueError):
    """A request log that cannot be replayed: what is wrong, and in which line.

    Attributes:
        path: the file.
        line: number of the line, from 1; 0 where the file as a whole is wrong.
        found: what is there.
        expected: what should be.
    """

    def __init__(self, path: Path, line: int, found: str, expected: str) -> None:
        where = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{where}: found {found}; expected {expected}")
        self.path, self.line, self.found, self.expected = path, line, found, expected


def read_trace(path: str | os.PathLike[str], *, block_size: int = 16) -> Trace:
    """Read and check all of a request log.

    Args:
        path: the file.
        block_size: tokens of a block, for a log with tokens; Mooncake's ids have 512.

    Raises:
        TraceError: the file is empty, or a line is not a request of the form of the first line.
        OSError: the file cannot be read.
    """
    path = Path(path)
    builder, form, form_line = None, "", 0
    timed: bool | None = None
    for line, request in _json_lines(path):
        try:
            found = "hash_ids" if "hash_ids" in request else "tokens"
            if builder is None:
                size = MOONCAKE_BLOCK_SIZE if found == "hash_ids" else block_size
                builder, form, form_line = TraceBuilder(tokens_per_block=size), found, line
                timed = "timestamp" in request
            if form not in request:
                raise _Mismatch(
                    f"a request without {form!r} (keys: {_short(list(request))})",
                    "'tokens' or 'hash_ids'"
                    if line == form_line
                    else f"{form!r} in every line, as in line {form_line}",
                )
            if ("timestamp" in request) != timed:
                raise _Mismatch(
                    f"a request {'without' if timed else 'with'} 'timestamp'",
                    f"timestamps in all lines or in none, as in line {form_line}",
                )
            add = _add_mooncake if form == "hash_ids" else _add_tokens
            add(builder, request, block_size)
        except _Mismatch as mismatch:
            raise TraceError(path, line, *mismatch.args) from None
    if builder is None:
        raise TraceError(path, 0, "no request", "a JSON object with a request in every line")
    return builder.build()


class _Mismatch(Exception):
    """What a line holds and what it should hold; `read_trace` adds the place."""


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line that is not blank."""
    expected = "a JSON object with one request (is the file cut off, or not JSON lines?)"
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                # ValueError: text, JSON, or a number of too many digits.
                request = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                start = _short(raw.decode("utf-8", errors="replace").strip())
                raise TraceError(path, line, f"{start} ({error})", expected) from error
            if not isinstance(request, dict):
                raise TraceError(path, line, _short(request), expected)
            yield line, request


def _add_mooncake(builder: TraceBuilder, request: dict[str, Any], _: int) -> None:
    _check_keys(request, _MOONCAKE_KEYS)
    if "input_length" not in request:
        raise _Mismatch("no 'input_length'", "the number of prompt tokens")
    num_tokens = _integer(request, "input_length", least=1)
    ids = request["hash_ids"]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _Mismatch(f"hash_ids={_short(ids)}", "a list of integers")
    num_blocks = -(-num_tokens // MOONCAKE_BLOCK_SIZE)
    if len(ids) != num_blocks:
        raise _Mismatch(
            f"{len(ids)} hash_ids for input_length={num_tokens}",
            f"{num_blocks}, one for every {MOONCAKE_BLOCK_SIZE} tokens or part of them",
        )
    builder.add(ids, num_tokens=num_tokens, timestamp=_common(request))


def _add_tokens(builder: TraceBuilder, request: dict[str, Any], block_size: int) -> None:
    _check_keys(request, _TOKENS_KEYS)
    tokens = request["tokens"]
    if not isinstance(tokens, list) or not tokens or not set(map(type, tokens)) <= {int}:
        raise _Mismatch(f"tokens={_short(tokens)}", "a list of at least one token id")
    for worst in (min(tokens), max(tokens)):
        if not 0 <= worst <= _MAX_INT32:
            raise _Mismatch(f"token {_short(worst)}", f"token ids from 0 to {_MAX_INT32}")
    for key in ("namespace", "cache_salt"):
        if type(request.get(key)) not in (str, int, type(None)):
            raise _Mismatch(f"{key}={_short(request[key])}", "a string, an integer or null")
    full = np.array(tokens, np.int32)[: len(tokens) // block_size * block_size]
    builder.add(
        (block.tobytes() for block in full.reshape(-1, block_size)),
        num_tokens=len(tokens),
        namespace=(request.get("namespace"), request.get("cache_salt")),
        timestamp=_common(request),
    )


def _common(request: dict[str, Any]) -> float:
    """Check what both forms may have; the timestamp, 0 without one."""
    if "output_length" in request:
        _integer(request, "output_length", least=0)
    timestamp = request.get("timestamp", 0)
    # A comparison of integers of any size first: to a float they may not convert.
    bounded = type(timestamp) in (int, float) and -(2**63) <= timestamp < 2**63
    if not bounded or not math.isfinite(timestamp):
        raise _Mismatch(f"timestamp={_short(timestamp)}", "a number below 2**63")
    return float(timestamp)


def _check_keys(request: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [key for key in request if key not in known]:
        raise _Mismatch(f"the unknown key {_short(unknown[0])}", f"only {', '.join(known)}")


def _integer(request: dict[str, Any], key: str, *, least: int) -> int:
    value = request[key]
    if type(value) is not int or not least <= value <= _MAX_INT32:
        raise _Mismatch(f"{key}={_short(value)}", f"an integer from {least} to {_MAX_INT32}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
