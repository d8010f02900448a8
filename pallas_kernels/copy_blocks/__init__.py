"""Copying whole blocks within a cache: copy-on-write and partial reuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dispatch import XLA, Op
from ..layout import NULL_BLOCK, check_index_dtype, debug_check_block_ids, safe_block_ids


def copy_blocks(
    kv_cache: jax.Array, src: jax.Array, dst: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Copy block `src[i]` to block `dst[i]` for every i; all reads happen before any write.

    A pair whose `dst` is the null block is padding and copies nothing. Ids outside `[0, P)`
    are an error in debug mode; otherwise such a `src` reads the null block and such a `dst`
    is dropped. Two pairs with the same `dst` leave one of the two sources there.

    Args:
        kv_cache: `[P, K, B, ROW]`, donated by callers that want no copy of the cache.
        src, dst: `int32[n]` block ids.
        implementation: None picks by platform; "xla".

    Returns:
        The cache, `[P, K, B, ROW]`.

    Raises:
        ValueError: `src` and `dst` differ in shape, are not vectors, or are not int32.
    """
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"{src.shape=} and {dst.shape=} must be equal vectors")
    check_index_dtype(src=src, dst=dst)
    used = dst != NULL_BLOCK
    debug_check_block_ids(src, used, kv_cache.shape[0])
    debug_check_block_ids(dst, used, kv_cache.shape[0])
    return _OP(implementation, kv_cache, src, dst)


def _xla(kv_cache: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    num_blocks = kv_cache.shape[0]
    rows = kv_cache[safe_block_ids(src, num_blocks)]
    # A negative index would wrap; one past the end is dropped.
    target = jnp.where((dst > NULL_BLOCK) & (dst < num_blocks), dst, num_blocks)
    return kv_cache.at[target].set(rows, mode="drop")


_OP = Op(name="copy_blocks", implementations={XLA: _xla}, order={})
