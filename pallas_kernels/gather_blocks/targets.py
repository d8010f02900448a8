"""Where blocks are written to, made safe for copies that run at the same time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK, safe_block_ids


def distinct_targets(block_ids: jax.Array, num_blocks: int) -> jax.Array:
    """Ids to write to, `int32[n]`: of equal ones the last stays, the others become the null block.

    So do ids outside `[0, P)`. Two copies to one block would otherwise leave a mixture there.
    """
    ids = safe_block_ids(block_ids, num_blocks)
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    is_last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    return jnp.zeros_like(ids).at[order].set(jnp.where(is_last, ordered, NULL_BLOCK))
