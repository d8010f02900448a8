"""The online softmax of one tile of queries, in registers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..arguments import AttentionOptions

_LOG2_E = math.log2(math.e)
# Where a row has seen no key yet. Finite, so that a row without keys never computes inf - inf.
_NOTHING = -1e30


class Softmax(NamedTuple):
    """Running state of R rows: peak (base-2 logarithm) and total `float32[R]`."""

    peak: jax.Array
    total: jax.Array

    @classmethod
    def empty(cls, num_rows: int, layout: Any) -> Softmax:
        peak, total = jnp.full((num_rows,), _NOTHING), jnp.zeros((num_rows,), jnp.float32)
        return cls(*(plgpu.layout_cast(x, layout.reduce(1)) for x in (peak, total)))


def over_rows(row_values: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Repeat one value per row along the columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row_values, shape, (0,)), layout)


def seen(
    shape: tuple[int, int],
    chunk: jax.Array,
    first_row: jax.Array | int,
    position: jax.Array,
    context: jax.Array,
    options: AttentionOptions,
    groups: int,
    layout: Any,
) -> jax.Array:
    """Which keys of a chunk each row of a tile sees: `bool[R, C]`, R from `first_row` on.

    `position` is that of the tile's first token, `context` the sequence's length.
    """
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + chunk * shape[1]
    if not options.causal:
        return key < context
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first_row
    return options.visible(key, position + lax.div(row, jnp.int32(groups)))


def add_scores(
    state: Softmax,
    scores: jax.Array,
    mask: jax.Array | None,
    options: AttentionOptions,
    layout: Any,
) -> tuple[Softmax, jax.Array, jax.Array]:
    """Fold in raw scores `float32[R, C]`, those of the mask if there is one.

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
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=1) * factor)
    shrink = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(scores * factor - over_rows(peak, scores.shape, layout))
    total = state.total * shrink + jnp.sum(weights, axis=1)
    return Softmax(peak, total), weights, shrink


def finish(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """`(1 / total, natural logarithm of the denominator)`, 0 and -inf for rows without keys."""
    empty = state.total == 0.0
    total = jnp.where(empty, 1.0, state.total)
    lse = (state.peak + jnp.log(total) * _LOG2_E) * (1 / _LOG2_E)
    return jnp.where(empty, 0.0, 1.0 / total), jnp.where(empty, -jnp.inf, lse)
