"""Whether a set of copies must read everything before it writes anything."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK


def chained(src: jax.Array, dst: jax.Array) -> jax.Array:
    """`int32[1]`: 1 if a block that is written is also read, else 0 (then any order is right)."""
    writes = dst != NULL_BLOCK
    read = jnp.where(writes, src, NULL_BLOCK)
    return jnp.any(writes & jnp.isin(dst, read)).astype(jnp.int32)[None]
