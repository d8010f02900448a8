"""Rotary position embeddings: frequencies, scaling schemes and the rotation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import LlamaConfig, RopeScaling


def rope_frequencies(config: LlamaConfig) -> tuple[np.ndarray, float]:
    """Angular frequency of each pair of dimensions, and the factor on cos and sin.

    Returns:
        (frequencies `float32[H/2]` in radians per position, attention factor).

    Source: RoFormer (arXiv:2104.09864); `linear` is position interpolation
    (arXiv:2306.15595); `yarn` is arXiv:2309.00071; `llama3` is the Llama 3.1 release.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / config.head_size
    freq = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return freq, 1.0
    if scaling.kind == "linear":
        return freq / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(freq, scaling), 1.0
    if scaling.kind == "factors":
        factors = np.asarray(scaling.factors, np.float32)
        if factors.shape != freq.shape:
            raise ValueError(f"{factors.shape=} of the RoPE factors must be {freq.shape}")
        return freq / factors, 1.0
    return _yarn(freq, scaling, config)


def _llama3(freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    rotations = s.original_context_len * freq / (2 * math.pi)
    span = (s.high_freq_factor - s.low_freq_factor) or 1e-6
    smooth = np.clip((rotations - s.low_freq_factor) / span, 0.0, 1.0).astype(np.float32)
    return (1 - smooth) * freq / np.float32(s.factor) + smooth * freq


def _yarn(freq: np.ndarray, s: RopeScaling, config: LlamaConfig) -> tuple[np.ndarray, float]:
    half = config.head_size // 2

    def dimension_of(rotations: float) -> float:
        return (
            config.head_size
            * math.log(s.original_context_len / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_size - 1)
    span = (high - low) or 0.001
    interpolated = np.clip((np.arange(half, dtype=np.float32) - low) / span, 0, 1)
    scaled = freq / np.float32(s.factor) * interpolated + freq * (1 - interpolated)
    factor = s.attention_factor
    if factor is None:
        factor = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return scaled.astype(np.float32), float(factor)


def rope_angles(positions: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for each position, `float32[T, H/2]` each, from `positions: int32[T]`."""
    freq, factor = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq)[None, :]

    def cos_and_sin(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def once(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA for CPU moves cosines into whatever multiplies by them, and computes them again in
        # every layer for every head (a seventh of a chunk's time, measured); barriers it drops
        # before. It does not look into a branch.
        return jax.lax.cond(angles[0, 0] >= 0, cos_and_sin, cos_and_sin, angles)

    return jax.lax.platform_dependent(angles, cpu=once, default=cos_and_sin)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `x: [T, heads, H]` by `cos, sin: float32[T, H/2]`; pairs are (i, i + H/2)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
