"""`linear` in plain XLA: `x @ weight`, and what an int8 weight takes.

With one row or two, as in decoding for one user, time goes by the bytes read, and the product is
made straight from the words. With more rows it goes by the operations, and the weight is unpacked
to float32 first, a tile that stays in the cache at a time, for the library's product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from .packed import (
    GROUP,
    NUM_PER_WORD,
    WORDS_PER_GROUP,
    PackedWeight,
    rounded_rows,
    unpack_by_place,
)

# On a CPU, the most rows that are multiplied one by one with the words.
_MAX_SINGLE_ROWS = 2
# Of a weight, this much is unpacked at once: a core's cache holds it.
_TILE_BYTES = 1 << 18
# Tiles are of whole vectors.
_VECTOR = 16
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


def linear_xla(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
    quantize_x: bool,
) -> jax.Array:
    """See `octavo.pallas_kernels.linear`."""
    if quantize_x:
        x = rounded_rows(x)
    if isinstance(weight, PackedWeight):
        weight, scale = weight.plain()
    if transposed:
        # The output head's: its logits are float32, whatever they are made of.
        product = partial(jnp.einsum, "ti,oi->to", preferred_element_type=jnp.float32)
        return by_rows(lambda rows: product(rows, weight), x, batch_invariant)
    if scale is None:
        return by_rows(lambda rows: rows @ weight, x, batch_invariant)
    # Tied to `x`, so that no loop around this, as that of decoding, unpacks the weight before it
    # begins and keeps it.
    x, words, factors = jax.lax.optimization_barrier((x, weight, scale))
    (num_rows, num_inputs), num_groups = x.shape, factors.shape[0]
    rows = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, num_groups * GROUP - num_inputs)))
    rows = rows.reshape(num_rows, num_groups, WORDS_PER_GROUP, NUM_PER_WORD)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and not batch_invariant and num_rows <= _MAX_SINGLE_ROWS:
        y = [_row_times(rows[i : i + 1], words, factors) for i in range(num_rows)]
        return jnp.concatenate(y).astype(x.dtype)
    # As `unpack_by_place` orders the inputs.
    rows = rows.transpose(0, 3, 2, 1).reshape(num_rows, -1)
    return _times(rows, words, factors, batch_invariant).astype(x.dtype)


def _row_times(x: jax.Array, words: jax.Array, scale: jax.Array) -> jax.Array:
    """`x: [1, G, J, 4]`, one row -> `[1, N]`."""
    sums = jnp.zeros((1, *scale.shape), jnp.float32)
    for j in range(WORDS_PER_GROUP):
        for place in range(NUM_PER_WORD):
            numbers = (words[j] << (24 - 8 * place)) >> 24
            sums = sums + x[:, :, j, place, None] * numbers.astype(jnp.float32)
    # By themselves, or XLA would make them anew for every output; and a product with ones, since
    # its sums over such an axis are slow.
    sums = jax.lax.optimization_barrier(sums * scale)
    return jnp.einsum("g,tgn->tn", jnp.ones(sums.shape[1], sums.dtype), sums)


def _times(x: jax.Array, words: jax.Array, scale: jax.Array, batch_invariant: bool) -> jax.Array:
    """`x: [T, in]`, inputs in the order of `unpack_by_place` -> `[T, N]`."""
    num_inputs, num_outputs = x.shape[1], scale.shape[1]

    def product(words: jax.Array, scale: jax.Array) -> jax.Array:
        weight = unpack_by_place(words, scale).reshape(num_inputs, -1)
        return by_rows(lambda rows: rows @ weight, x, batch_invariant)

    tile = _tile_size(num_inputs, num_outputs)
    if jax.default_backend() != "cpu" or num_outputs <= tile:
        return product(words, scale)
    num_tiles, rest = divmod(num_outputs, tile)

    def one(index: jax.Array) -> jax.Array:
        start = index * tile
        return product(
            jax.lax.dynamic_slice_in_dim(words, start, tile, axis=2),
            jax.lax.dynamic_slice_in_dim(scale, start, tile, axis=1),
        )

    tiles = jax.lax.map(one, jnp.arange(num_tiles, dtype=jnp.int32))
    y = tiles.swapaxes(0, 1).reshape(x.shape[0], -1)
    if not rest:
        return y
    return jnp.concatenate([y, product(words[:, :, -rest:], scale[:, -rest:])], axis=1)


def _tile_size(num_inputs: int, num_outputs: int) -> int:
    """Outputs of a tile: such that nothing is left over, unless they would be far too few."""
    most = max(_TILE_BYTES // (4 * num_inputs) // _VECTOR, 1) * _VECTOR
    sizes = range(most, most // 4, -_VECTOR)
    return next((size for size in sizes if num_outputs % size == 0), most)
