"""`write_kv` as XLA scatters, without a copy of the cache when it is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv_xla(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.write_kv`."""
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    block, offset = slots // block_size, slots % block_size
    live = (block > 0) & (block < num_blocks)
    cache = _zero_opened_blocks(kv_cache, jnp.where(live & (offset == 0), block, 0))

    rows = jnp.concatenate([k, v], axis=-1).astype(cache.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[-1])))
    # Row indices into the flat view: a scatter with a window over heads makes XLA copy the
    # cache inside a scan over layers; whole rows do not.
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    row_ids = (block[:, None] * num_kv_heads + heads) * block_size + offset[:, None]
    num_rows = num_blocks * num_kv_heads * block_size
    row_ids = jnp.where(live[:, None], row_ids, num_rows)
    flat = cache.reshape(num_rows, width).at[row_ids].set(rows, mode="drop")
    return flat.reshape(cache.shape)


def _zero_opened_blocks(cache: jax.Array, opened: jax.Array) -> jax.Array:
    """Zero the blocks `opened: int32[T]`; 0 stands for none."""
    return jax.lax.platform_dependent(
        cache, opened, cuda=_zero_in_one, rocm=_zero_in_one, default=_zero_one_by_one
    )


def _zero_in_one(cache: jax.Array, opened: jax.Array) -> jax.Array:
    # A GPU's host would wait for every round of a loop whose length is not known; threads that
    # have nothing to write cost it little.
    target = jnp.where(opened == 0, cache.shape[0], opened)
    return cache.at[target].set(jnp.zeros((), cache.dtype), mode="drop")


def _zero_one_by_one(cache: jax.Array, opened: jax.Array) -> jax.Array:
    # A loop over the blocks that really open: one scatter over all T tokens would move T whole
    # blocks, B times the data that is written.
    order = jnp.argsort(opened == 0, stable=True)
    count = jnp.sum(opened != 0, dtype=jnp.int32)
    zeros = jnp.zeros((1, *cache.shape[1:]), cache.dtype)

    def zero(i: jax.Array, cache: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, zeros, (opened[order[i]], 0, 0, 0))

    return jax.lax.fori_loop(0, count, zero, cache)
