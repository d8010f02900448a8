"""Masks of the tokens that may come next, made on the host, applied on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .request import Request


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenMasks:
    """For R rows.

    Attributes:
        constrained: `bool[R]`; the others may have any token.
        bits: `int32[R, ceil(V / 32)]`, a bit for each token, the first in the lowest place.
    """

    constrained: jax.Array | np.ndarray
    bits: jax.Array | np.ndarray


def no_masks(num_rows: int, vocab_size: int) -> TokenMasks:
    """Rows that may have any token."""
    return masks_of([], num_rows, vocab_size)


def masks_of(requests: Sequence[Request | None], num_rows: int, vocab_size: int) -> TokenMasks:
    """What each request's grammar allows next, as far as it has one."""
    constrained = np.zeros(num_rows, np.bool_)
    bits = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
    for row, request in enumerate(requests):
        if request is not None and request.grammar is not None:
            constrained[row] = True
            request.grammar.fill(bits[row])
    return TokenMasks(constrained=constrained, bits=bits)


def mask_logits(logits: jax.Array, masks: TokenMasks) -> jax.Array:
    """`logits: float32[R, V]` with minus infinity for what may not come."""
    constrained = jnp.asarray(masks.constrained)

    def mask(x: jax.Array) -> jax.Array:
        place = jnp.arange(32, dtype=jnp.int32)
        allowed = (jnp.asarray(masks.bits)[:, :, None] >> place) & 1 == 1
        allowed = allowed.reshape(x.shape[0], -1)[:, : x.shape[1]]
        return jnp.where(allowed | ~constrained[:, None], x, -jnp.inf)

    return jax.lax.cond(jnp.any(constrained), mask, lambda x: x, logits)
