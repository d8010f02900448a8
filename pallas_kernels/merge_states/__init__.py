"""Merging partial attention results over disjoint sets of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two attention states over disjoint keys into the state over their union.

    The merge is associative and commutative, so split-KV, cascade and anything built from
    `(out, lse)` pairs can be folded in any order. A state over no keys has `lse = -inf`
    and its `out` is ignored, NaN included.

    Args:
        out_a, out_b: `[..., H]` attention outputs, of one dtype.
        lse_a, lse_b: `float32[...]` natural logarithms of the softmax denominators.

    Returns:
        `(out [..., H], lse float32[...])`; zeros and -inf where both states are empty.

    Raises:
        ValueError: shapes or dtypes do not match.

    Example:
        >>> import jax.numpy as jnp
        >>> one, half = jnp.ones((1, 2)), jnp.zeros((1,))
        >>> out, lse = merge_states(one, half, 3 * one, half)
        >>> float(out[0, 0]), round(float(lse[0]), 4)
        (2.0, 0.6931)

    Source: the associative merge of FlashInfer (arXiv:2501.01005, section 2.2).
    """
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(f"{out_a.shape=} {out_a.dtype=} must equal {out_b.shape=} {out_b.dtype=}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1] or lse.dtype != jnp.float32:
            raise ValueError(
                f"{name} is {lse.dtype}{list(lse.shape)}, expected float32{list(out_a.shape[:-1])}"
            )
    peak = jnp.maximum(lse_a, lse_b)
    # exp(-inf - -inf) is NaN: two empty states are scaled from 0 instead.
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    divisor = jnp.where(total == 0, 1.0, total)

    def part(out: jax.Array, weight: jax.Array) -> jax.Array:
        share = (weight / divisor)[..., None]
        return jnp.where(share == 0, 0.0, out.astype(jnp.float32) * share)

    out = part(out_a, weight_a) + part(out_b, weight_b)
    return out.astype(out_a.dtype), peak + jnp.log(total)
