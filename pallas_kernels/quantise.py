"""Quantised caches: int8 and float8_e4m3fn numbers with one static scale per KV head.

A stored number stands for `number * scale`. The scales of a layer never change while its cache
lives: a block's bits must not depend on what was written beside it, or it could not be shared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest number that each quantised dtype holds; int8 symmetrically.
_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def quantise(x: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round `x / scale` to a quantised dtype; what is too large becomes its largest number.

    Ties round to even. The inverse is `stored.astype(float32) * scale`.

    Args:
        x: `[..., K, H]`.
        scale: `float32[K]`, positive.
        dtype: int8 or float8_e4m3fn.

    Returns:
        `[..., K, H]` of `dtype`.

    Raises:
        ValueError: `dtype` is no quantised dtype, or `scale` is not one number per head.
    """
    largest = _largest(dtype)
    if x.ndim < 2 or scale.shape != x.shape[-2:-1]:
        raise ValueError(f"{scale.shape=} must be [K] for {x.shape=} [..., K, H]")
    scaled = x.astype(jnp.float32) / scale.astype(jnp.float32)[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    # The cast itself does not saturate: 500 would become NaN in float8_e4m3fn.
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def kv_scales(
    k: jax.Array, v: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Scales with which the largest key and value of each head just fit.

    Args:
        k, v: `[..., K, H]` keys (after RoPE) and values of one layer on typical prompts; what is
            larger later is cut off.
        dtype: int8 or float8_e4m3fn.

    Returns:
        `(k_scale float32[K], v_scale float32[K])`; 1 for a head that holds only zeros.

    Raises:
        ValueError: `dtype` is no quantised dtype, or `k` or `v` has no heads.

    Example:
        >>> k, v = jnp.full((5, 1, 4), 254.0), jnp.full((5, 1, 4), -12.7)
        >>> [round(float(scale[0]), 4) for scale in kv_scales(k, v, jnp.int8)]
        [2.0, 0.1]
    """
    largest = _largest(dtype)
    if k.ndim < 2 or v.ndim < 2:
        raise ValueError(f"{k.shape=} and {v.shape=} must be [..., K, H]")

    def scale(x: jax.Array) -> jax.Array:
        others = tuple(axis for axis in range(x.ndim) if axis != x.ndim - 2)
        peak = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=others, initial=0.0)
        return jnp.where(peak > 0, peak / largest, 1.0)

    return scale(k), scale(v)


def _largest(dtype: jax.typing.DTypeLike) -> float:
    if jnp.dtype(dtype) not in _LARGEST:
        raise ValueError(f"dtype={jnp.dtype(dtype)} is not one of int8, float8_e4m3fn")
    return _LARGEST[jnp.dtype(dtype)]
