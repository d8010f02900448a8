"""The root-mean-square norm."""

from __future__ import annotations

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

# Summed side by side when bits must not depend on the number of rows.
_LANES = 64


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, *, batch_invariant: bool = False
) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (arXiv:1910.07467).

    Args:
        x: `[..., D]`.
        weight: `[D]`.
        eps: added to the mean of the squares.
        batch_invariant: whether a row's bits may not depend on how many there are.

    Returns:
        `[..., D]` of `x.dtype`, or what that and the weight's promote to.
    """
    x32 = x.astype(jnp.float32)
    if batch_invariant:
        mean = _sum_in_order(x32 * x32) / x.shape[-1]
    else:
        mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * weight


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Sums `[..., 1]` over the last axis by additions in a fixed order.

    XLA sums few and many rows by different programs, and each in an order of its own.
    """
    x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % _LANES)))
    # Alone, so that no product before it is rounded in one program and not in another.
    x = jax.lax.optimization_barrier(x)
    x = reduce(add, jnp.split(x, x.shape[-1] // _LANES, axis=-1))
    x = jax.lax.optimization_barrier(x)
    while x.shape[-1] > 1:
        x = add(*jnp.split(x, 2, axis=-1))
    return x
