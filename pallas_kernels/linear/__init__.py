"""Products of activations with the weights of linear layers, in float32 or int8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dispatch import NUMBA, REFERENCE, XLA, Op
from .numba import linear_numba
from .packed import GROUP, WORDS_PER_GROUP, unpack
from .xla import by_rows as by_rows
from .xla import linear_xla


def _linear_reference(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
) -> jax.Array:
    del batch_invariant
    if transposed:
        return jnp.matmul(x, weight.T, precision="highest", preferred_element_type=jnp.float32)
    if scale is not None:
        weight = unpack(weight, scale)[: x.shape[1]]
    return jnp.matmul(x, weight, precision="highest").astype(x.dtype)


# The most rows with which XLA is done sooner on a CPU, of a weight in float32 and of one in int8:
# it reads either faster, but makes nothing of what it has read for the rows after those.
_MOST_ROWS_FOR_XLA, _MOST_ROWS_FOR_XLA_INT8 = 1, 2

_OP = Op(
    name="linear",
    implementations={REFERENCE: _linear_reference, NUMBA: linear_numba, XLA: linear_xla},
)


def linear(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    transposed: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ weight`, of a weight as it is or of one in int8; or `x @ weight.T`.

    In int8, four inputs lie in a word, the first in its lowest byte, and the words of a group of
    32 inputs have an axis of their own, the first; G is in / 32, rounded up.

    Args:
        x: `[T, in]`.
        weight: `[in, out]`, or `int32[8, G, out]`.
        scale: `float32[G, out]` factors of an int8 weight, else None.
        transposed: the weight is `[out, in]`, as an embedding that is also the output head; not
            with int8.
        batch_invariant: compute every row as if it were alone, so that its bits do not depend on
            what else is computed, on a CPU (XLA promises nothing elsewhere).
        implementation: None picks by platform; "numba" (CPUs, float32 activations; bits never
            depend on other rows; it has no gradient), "xla" or "reference". A named one never
            falls back.

    Returns:
        `[T, out]` in x's dtype; in float32 if transposed.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot serve this call.
    """
    if x.ndim != 2:
        raise ValueError(f"{x.shape=} must be [T, in]")
    if transposed and scale is not None:
        raise ValueError("transposed=True is not for int8 weights")
    if scale is None:
        if weight.ndim != 2 or weight.shape[-1 if transposed else 0] != x.shape[1]:
            expected = "[out, in]" if transposed else "[in, out]"
            raise ValueError(f"{weight.shape=} must be {expected}, in={x.shape[1]}")
    else:
        groups = -(-x.shape[1] // GROUP)
        if weight.ndim != 3 or weight.shape[:2] != (WORDS_PER_GROUP, groups):
            raise ValueError(f"{weight.shape=} must be [{WORDS_PER_GROUP}, {groups}, out]")
        if weight.dtype != jnp.int32 or scale.dtype != jnp.float32:
            raise ValueError(f"{weight.dtype=} must be int32 and {scale.dtype=} float32")
        if scale.shape != weight.shape[1:]:
            raise ValueError(f"{scale.shape=} must be {weight.shape[1:]}")
    num_outputs = weight.shape[0 if transposed else -1]
    if 0 in (*x.shape, num_outputs):
        dtype = jnp.float32 if transposed else x.dtype
        return jnp.zeros((x.shape[0], num_outputs), dtype)
    few = _MOST_ROWS_FOR_XLA if scale is None else _MOST_ROWS_FOR_XLA_INT8
    if implementation is None and x.shape[0] <= few and not batch_invariant:
        implementation = XLA
    return _OP(implementation, x, weight, scale, batch_invariant, transposed)
