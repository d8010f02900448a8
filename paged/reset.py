"""Forgetting what is cached: all blocks that nobody holds become free at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .index import remove_blocks
from .pool import give_back
from .state import CacheState


def reset_cache(
    state: CacheState, *, keep_pinned: jax.typing.ArrayLike = False
) -> tuple[CacheState, jax.Array]:
    """Free every cached block; those that sequences hold stay, and stay shared.

    Args:
        state: the manager.
        keep_pinned: `bool[]`; False ends all pins, True leaves them and what they keep.

    Returns:
        `(state, num_freed int32[])`. Counters and the history of evictions go on.
    """
    index, keep_pinned = state.index, jnp.asarray(keep_pinned)
    kept = keep_pinned & (index.pin_until > state.now)
    # Whole subtrees: nobody holds a block without its parent, or pins it for longer.
    gone = index.indexed & (state.pool.ref_count == 0) & ~kept
    (blocks,) = jnp.nonzero(gone, size=gone.shape[0], fill_value=NULL_BLOCK)
    blocks = blocks.astype(jnp.int32)
    pool = give_back(state.pool, blocks)
    index = remove_blocks(index, blocks)
    index = replace(index, pin_until=jnp.where(keep_pinned, index.pin_until, 0))
    return replace(state, pool=pool, index=index), jnp.sum(gone, dtype=jnp.int32)
