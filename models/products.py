"""Matrix products whose bits do not depend on the batch, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_INVARIANT_ROWS = 16


def by_rows(
    product: Callable[[jax.Array], jax.Array], x: jax.Array, batch_invariant: bool
) -> jax.Array:
    """A product with the rows of `x: [T, in]`; batch-invariant, in pieces of one size.

    How a library sums up a product depends on its number of rows.
    """
    if not batch_invariant:
        return product(x)
    pieces = jnp.pad(x, ((0, -x.shape[0] % _INVARIANT_ROWS), (0, 0)))
    y = jax.lax.map(product, pieces.reshape(-1, _INVARIANT_ROWS, x.shape[1]))
    return y.reshape(-1, y.shape[-1])[: x.shape[0]]
