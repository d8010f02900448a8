"""Joining the results of programs that shared one query's keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Join the splits `out float32[splits, ..., H]`, `lse float32[splits, ...]` of every row.

    As one reduction of pairs, which XLA makes one kernel; a softmax over the splits takes five.
    """

    def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
        (out_a, lse_a), (out_b, lse_b) = a, b
        peak = jnp.maximum(lse_a, lse_b)
        peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
        weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
        total = weight_a + weight_b
        joined = (out_a * weight_a + out_b * weight_b) / jnp.where(total == 0, 1.0, total)
        return joined, peak + jnp.log(total)

    states = (out, jnp.broadcast_to(lse[..., None], out.shape))
    out, lse = jax.lax.reduce(states, (jnp.float32(0), jnp.float32(-jnp.inf)), join, (0,))
    return out, lse[..., 0]
