"""Sampling on device: every row by its own parameters and its own random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of R rows.

    Attributes:
        temperature, top_p, min_p: `float32[R]`; temperature 0 is greedy.
        top_k: `int32[R]`, 0 for all tokens.
        seed: `uint32[R]`.
        index: `int32[R]` which token of its request each row samples; with the seed it decides
            the random numbers, so neither the batch nor the row does.
    """

    temperature: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    index: jax.Array | np.ndarray


_PART = 512


def likeliest(logits: jax.Array) -> jax.Array:
    """The first of the largest in each row, `float32[R, V]` -> `int32[R]`, as `argmax` finds it.

    In two steps: XLA finds maxima on a CPU 30 times as fast as where they are (32 x 49,152: 0.11 ms
    in place of 3.4).
    """
    num_rows, vocab_size = logits.shape
    padding = ((0, 0), (0, -vocab_size % _PART))
    parts = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(num_rows, -1, _PART)
    part = jnp.argmax(jnp.max(parts, axis=-1), axis=-1)
    own = jnp.take_along_axis(parts, part[:, None, None], axis=1)[:, 0]
    return (part * _PART + jnp.argmax(own, axis=-1)).astype(jnp.int32)


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Draw a token `int32[R]` from `logits: float32[R, V]`.

    `min_p`, then `top_k`, then `top_p` narrow the choice; tokens that tie with the last one
    kept are kept as well. The draw is the Gumbel-max trick.
    """
    greedy = likeliest(logits)

    def draw(_: None) -> jax.Array:
        scale = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
        scaled = logits / scale[:, None]
        filters = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        kept = jax.lax.cond(
            jnp.any(filters & (rows.temperature > 0)),
            lambda x: _narrow(x, rows),
            lambda x: x,
            scaled,
        )
        return likeliest(kept + _gumbel(rows, logits.shape[-1]))

    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda _: greedy, None)
    return jnp.where(rows.temperature > 0, drawn, greedy)


def _gumbel(rows: SamplingRows, vocab_size: int) -> jax.Array:
    def one(seed: jax.typing.ArrayLike, index: jax.typing.ArrayLike) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(one)(rows.seed, rows.index)


def _narrow(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    top = jnp.max(scaled, axis=-1, keepdims=True)
    floor = top + jnp.log(rows.min_p)[:, None]
    scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    count = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])
    ones = jnp.ones_like(scaled)
    scaled = _keep_top(scaled, ones, jnp.minimum(count, scaled.shape[-1]).astype(jnp.float32))
    weights = jnp.exp(scaled - top)
    target = jnp.sum(weights, axis=-1) * rows.top_p
    return jnp.where((rows.top_p < 1)[:, None], _keep_top(scaled, weights, target), scaled)


def _keep_top(scaled: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Keep each row's largest values until their weights reach `target: float32[R]`.

    Bisection over the bits of the value finds the exact threshold in 32 passes; sorting the
    vocabulary costs more.
    """
    order = _ordered_bits(scaled)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean without overflow, rounded up.
        middle = (low | high) - ((low ^ high) >> 1)
        held = jnp.sum(jnp.where(order >= middle[:, None], weights, 0.0), axis=-1)
        enough = held >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    rows = scaled.shape[0]
    bounds = (jnp.full(rows, -(2**31), jnp.int32), jnp.full(rows, 2**31 - 1, jnp.int32))
    threshold, _ = jax.lax.fori_loop(0, 32, halve, bounds)
    return jnp.where(order >= threshold[:, None], scaled, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """`int32` that orders as the floats do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
