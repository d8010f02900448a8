"""The host's arrays for one step: requests as rows, zeros for padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .programs import DecodeRows, PackedRows
from .request import Request


def seat_of(request: Request) -> int:
    """The row of the block tables that a running request has."""
    assert request.seat is not None, "only running requests have blocks"
    return request.seat


def adapter_slot(request: Request) -> int:
    """The slot of a request's adapter, 0 for none."""
    return 0 if request.adapter is None else request.adapter.slot


def draws_after(request: Request, count: int) -> bool:
    """Whether a packed step with the next `count` tokens of a request draws one more."""
    return count == 0 or request.num_computed + count == request.num_tokens


def packed_rows(
    work: Sequence[tuple[Request, int]], num_tokens: int, num_rows: int
) -> tuple[np.ndarray, PackedRows]:
    """The next `count` tokens of each (request, count): `int32[num_tokens]` and their rows."""
    tokens = np.zeros(num_tokens, np.int32)
    seat, context_len, query_len, adapter = np.zeros((4, num_rows), np.int32)
    draws, scored = np.zeros((2, num_rows), np.bool_)
    at = 0
    for i, (request, count) in enumerate(work):
        # A row of no tokens draws what the row before it could have drawn.
        begin = request.num_computed if count else request.num_tokens
        tokens[at : at + count] = request.tokens[begin : begin + count]
        seat[i], query_len[i], context_len[i] = seat_of(request), count, begin + count
        adapter[i] = adapter_slot(request)
        draws[i], scored[i] = draws_after(request, count), request.scores_prompt
        at += count
    return tokens, PackedRows(
        seat=seat,
        context_len=context_len,
        query_len=query_len,
        adapter=adapter,
        draws=draws,
        scored=scored,
    )


def decode_rows(
    requests: Sequence[Request], num_rows: int, num_steps: int | None = None
) -> DecodeRows:
    """The rows of a decode loop, in which they generate up to `num_steps` tokens if given."""
    seat, token, context_len, limit, adapter = np.zeros((5, num_rows), np.int32)
    for i, request in enumerate(requests):
        seat[i], context_len[i] = seat_of(request), request.num_computed
        token[i] = request.tokens[request.num_tokens - 1]
        adapter[i] = adapter_slot(request)
        limit[i] = request.max_tokens - request.num_generated
    if num_steps is not None:
        limit = np.minimum(limit, np.int32(num_steps))
    return DecodeRows(seat=seat, token=token, context_len=context_len, limit=limit, adapter=adapter)
