"""A request log as arrays: which blocks every request asks for, in the order of arrival.

One *symbol* stands for one block of tokens together with all blocks before it and the namespace.
So equal symbols are equal prefixes, a symbol always stands at the same place of a request, and a
request never holds one twice.

    >>> builder = TraceBuilder(tokens_per_block=4)
    >>> builder.add(["system", "question 1"], num_tokens=7)
    >>> builder.add(["system", "question 2"], num_tokens=8)
    >>> builder.add(["other", "question 1"], num_tokens=8)  # not the same block: another parent
    >>> trace = builder.build()
    >>> [trace.blocks(r).tolist() for r in range(trace.num_requests)]
    [[0, 1], [0, 2], [3, 4]]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """R requests that ask for U blocks between them; ragged, request r is `blocks(r)`.

    Attributes:
        symbols: `int32[U]` blocks of all requests, one request after the other.
        offsets: `int64[R + 1]` where each request starts in `symbols`.
        num_tokens: `int64[R]` prompt tokens of each request; they may end within its last block
            or, where only full blocks can be reused, past it.
        namespaces: `int32[R]` id of each request's namespace; requests share within one only.
        tokens_per_block: tokens that a symbol stands for, B.
        num_symbols: distinct symbols; they are `0 <= symbol < num_symbols`.
    """

    symbols: np.ndarray
    offsets: np.ndarray
    num_tokens: np.ndarray
    namespaces: np.ndarray
    tokens_per_block: int
    num_symbols: int

    @property
    def num_requests(self) -> int:
        """Requests, R."""
        return self.num_tokens.shape[0]

    @property
    def num_blocks(self) -> np.ndarray:
        """Blocks that each request asks for, `int64[R]`."""
        return np.diff(self.offsets)

    def blocks(self, request: int) -> np.ndarray:
        """The symbols of one request, `int32[num_blocks[request]]`."""
        return self.symbols[self.offsets[request] : self.offsets[request + 1]]

    def request_of_block(self) -> np.ndarray:
        """The request that each entry of `symbols` belongs to, `int64[U]`."""
        return np.repeat(np.arange(self.num_requests), self.num_blocks)


class TraceBuilder:
    """Collects requests and gives each distinct chained block its symbol."""

    def __init__(self, *, tokens_per_block: int) -> None:
        if tokens_per_block < 1:
            raise ValueError(f"{tokens_per_block=} must be at least 1")
        self._tokens_per_block = tokens_per_block
        self._namespaces: dict[Hashable, int] = {}
        self._symbols: dict[tuple[int, Hashable], int] = {}
        self._requests: list[np.ndarray] = []
        self._num_tokens: list[int] = []
        self._namespace_ids: list[int] = []
        self._timestamps: list[float] = []

    def add(
        self,
        blocks: Iterable[Hashable],
        *,
        num_tokens: int,
        namespace: Hashable = None,
        timestamp: float = 0,
    ) -> None:
        """Append a request.

        Args:
            blocks: what identifies each block's tokens, given the blocks before it.
            num_tokens: of the prompt, at least 1.
            namespace: requests with different ones share nothing.
            timestamp: of the arrival, in any unit; requests with equal ones stay in order.
        """
        if not 1 <= num_tokens <= _MAX_INT32:
            raise ValueError(f"{num_tokens=} must be from 1 to {_MAX_INT32}")
        namespace_id = self._namespaces.setdefault(namespace, len(self._namespaces))
        parent = -1 - namespace_id  # roots are negative, symbols are not
        chain = []
        for block in blocks:
            parent = self._symbols.setdefault((parent, block), len(self._symbols))
            chain.append(parent)
        self._requests.append(np.array(chain, np.int32))
        self._num_tokens.append(num_tokens)
        self._namespace_ids.append(namespace_id)
        self._timestamps.append(timestamp)

    def build(self) -> Trace:
        """The trace of the requests so far, in the order of their timestamps.

        Raises:
            ValueError: there are none.
        """
        if not self._requests:
            raise ValueError("a trace needs at least one request")
        order = np.argsort(np.array(self._timestamps), kind="stable")
        requests = [self._requests[i] for i in order]
        sizes = np.array([len(blocks) for blocks in requests], np.int64)
        return Trace(
            symbols=np.concatenate(requests),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            num_tokens=np.array(self._num_tokens, np.int64)[order],
            namespaces=np.array(self._namespace_ids, np.int32)[order],
            tokens_per_block=self._tokens_per_block,
            num_symbols=len(self._symbols),
        )
