"""The obvious `write_kv`: one token after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv_reference(
    kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    num_blocks, _, block_size, width = kv_cache.shape
    rows = jnp.concatenate([k, v], axis=-1).astype(kv_cache.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[-1])))

    def write(cache: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        slot, row = token
        block, offset = slot // block_size, slot % block_size
        live = (block > 0) & (block < num_blocks)
        block = jnp.where(live, block, 0)
        old = cache[block]
        opened = jnp.where(offset == 0, jnp.zeros_like(old), old)
        new = opened.at[:, offset].set(row)
        return cache.at[block].set(jnp.where(live, new, old)), None

    return jax.lax.scan(write, kv_cache, (slots, rows))[0]
