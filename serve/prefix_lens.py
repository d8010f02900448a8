"""How much of each waiting request is cached, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ..paged import PrefixIndex, match
from .layout import CacheLayout
from .program import Program
from .request import Request

# What one call sends to the device, at most, unless contexts are so long that few fit.
_MAX_TOKENS = 1 << 20
_FEWEST = 8


class PrefixLens:
    """Matches W requests against the index at once; nothing is changed, and one number is read.

    Args:
        layout: M, the blocks of a request.
        block_size: B.
        num_requests: W, less if so many contexts are too long to be sent.

    Attributes:
        num_requests: W, resolved.
    """

    def __init__(self, layout: CacheLayout, block_size: int, num_requests: int):
        context = layout.blocks_per_seq * block_size
        self.num_requests = min(num_requests, max(_FEWEST, _MAX_TOKENS // context))
        self._shape = (self.num_requests, layout.blocks_per_seq, block_size)
        self.program = Program("match", _match_all, donate=())

    def compile(self, index: PrefixIndex) -> None:
        """Compile the program ahead."""
        self.program.compile(1, index, *self._args([]))

    def __call__(self, index: PrefixIndex, requests: Sequence[Request]) -> list[int]:
        """Tokens in the cached full blocks at the start of each of at most W requests."""
        blocks = np.asarray(self.program(1, index, *self._args(requests)))
        return (blocks[: len(requests)] * self._shape[2]).tolist()

    def _args(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros(self._shape, np.int32)
        num_blocks, namespace = np.zeros((2, self.num_requests), np.int32)
        for i, request in enumerate(requests):
            tokens[i].reshape(-1)[: request.num_tokens] = request.tokens[: request.num_tokens]
            num_blocks[i] = (request.num_tokens - 1) // self._shape[2]
            namespace[i] = request.namespace
        return tokens, num_blocks, namespace


def _match_all(
    index: PrefixIndex, tokens: jax.Array, num_blocks: jax.Array, namespace: jax.Array
) -> jax.Array:
    """Matched blocks `int32[W]` of `tokens: int32[W, M, B]`."""
    lanes = jax.vmap(match, in_axes=(None, 0, 0, 0))
    return lanes(index, tokens, num_blocks, namespace)[1]
