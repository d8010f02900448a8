"""Loops and branches that stay loops and branches under `vmap`.

A `while_loop` whose condition differs between lanes is batched by selecting its whole carry at
every turn, and a `cond` by running both branches: each costs a copy of the state. Here a condition
is first reduced over all lanes; the body masks what is not meant for a lane.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


@custom_vmap
def any_lane(flag: jax.Array) -> jax.Array:
    """`flag: bool[]` itself; under `vmap`, whether it holds in any lane (one value for all)."""
    return flag


@any_lane.def_vmap
def _any_lane_batched(
    axis_size: int, in_batched: list[bool], flag: jax.Array
) -> tuple[jax.Array, bool]:
    del axis_size
    return (any_lane(jnp.any(flag, axis=0)) if in_batched[0] else flag), False


def after(target: jax.Array, *reads: jax.Array) -> jax.Array:
    """`target: int32[...]` itself, known only once `reads` are.

    A scatter to places that do not depend on a gather from the same array may be ordered before it,
    and then XLA copies the array. The number added is 0, which XLA does not see.
    """
    for read in reads:
        lowest = jnp.min(read.astype(jnp.int32), initial=0)
        target = target + jnp.minimum(lowest & 1, 0)
    return target
