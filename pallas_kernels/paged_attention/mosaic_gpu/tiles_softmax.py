"""The online softmax of one tile of queries, in registers."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arguments import AttentionOptions

_LOG2_E = math.log2(math.e)
# Where a row has seen no key yet. Finite, so that a row without keys never computes inf - inf.
NOTHING = -1e30


class Softmax(NamedTuple):
    """Running state of R rows: peak (base-2 logarithm) and total `float32[R]`."""

    peak: jax.Array
    total: jax.Array


def over_rows(row_values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeat one value per row along the columns."""
    return lax.broadcast_in_dim(row_values, shape, (0,))


def add_scores(
    state: Softmax, scores: jax.Array, seen: jax.Array | None, options: AttentionOptions
) -> tuple[Softmax, jax.Array, jax.Array]:
    """Fold in raw scores `float32[R, C]`.

    Returns:
        the new state, the weights `float32[R, C]` and the factor `float32[R]` by which what was
        accumulated before must shrink.
    """
    factor = options.scale * _LOG2_E
    if options.soft_cap is not None:
        # tanh from exp2: the hardware's tanh is good for 11 bits only.
        grown = jnp.exp2(scores * (2 * factor / options.soft_cap))
        scores = options.soft_cap * (1.0 - 2.0 / (grown + 1.0))
        factor = _LOG2_E
    elif factor <= 0:
        scores, factor = scores * factor, 1.0
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=1) * factor)
    shrink = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores * factor - over_rows(peak, scores.shape))
    total = state.total * shrink + jnp.sum(weights, axis=1)
    return Softmax(peak, total), weights, shrink


def finish(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """`(1 / total, natural logarithm of the denominator)`, 0 and -inf for rows without keys."""
    empty = state.total == 0.0
    total = jnp.where(empty, 1.0, state.total)
    lse = (state.peak + jnp.log(total) * _LOG2_E) * (1 / _LOG2_E)
    return jnp.where(empty, 0.0, 1.0 / total), jnp.where(empty, -jnp.inf, lse)
