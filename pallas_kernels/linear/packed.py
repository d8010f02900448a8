"""How int8 weights lie in memory: four inputs in a 32-bit word, a scale for every 32 of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GROUP = 32
NUM_PER_WORD = 4
WORDS_PER_GROUP = GROUP // NUM_PER_WORD


def unpack_by_place(words: jax.Array, scale: jax.Array) -> jax.Array:
    """`int32[8, G, N]` and `float32[G, N]` -> `float32[4, 8, G, N]`: place, word, group, output."""
    left = jnp.array([24, 16, 8, 0], jnp.int32)[:, None, None, None]
    return ((words << left) >> 24).astype(jnp.float32) * scale


def unpack(words: jax.Array, scale: jax.Array) -> jax.Array:
    """`int32[8, G, N]` and `float32[G, N]` -> `float32[32*G, N]`."""
    return unpack_by_place(words, scale).transpose(2, 1, 0, 3).reshape(-1, scale.shape[1])
