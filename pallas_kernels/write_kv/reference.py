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

    block, offset = slots // block_size, slots % block_size
    live = (block > 0) & (block < num_blocks)
    block = jnp.where(live, block, 0)

    def open_block(cache: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        block, offset, live, _ = token
        opens = live & (offset == 0)
        return cache.at[block].set(jnp.where(opens, 0, cache[block])), None

    def write(cache: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        block, offset, live, row = token
        old = cache[block, :, offset]
        return cache.at[block, :, offset].set(jnp.where(live, row, old)), None

    tokens = (block, offset, live, rows)
    opened, _ = jax.lax.scan(open_block, kv_cache, tokens)
    return jax.lax.scan(write, opened, tokens)[0]
