"""Weights of linear layers in int8, with a factor for every group of inputs.

A weight `[in, out]` becomes whole numbers from -127 to 127, and a float32 per output and per group
of 32 inputs: 1.125 bytes per weight instead of 4. Activations stay as they are. Four inputs lie in
one 32-bit word, and outputs side by side: so a CPU unpacks whole vectors, by shifts alone, which
compilers do well where they do bytes badly.

With one row or two, as in decoding for one user, time goes by the bytes read, and the product is
made straight from the words. With more rows it goes by the operations, and the weight is unpacked
to float32 first, a tile that stays in the cache at a time, for the library's product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from .config import LlamaConfig
from .products import by_rows

QUANTIZATIONS = ("int8",)
_GROUP = 32
_PER_WORD = 4
# Words of a group: J.
_WORDS = _GROUP // _PER_WORD
# On a CPU, the most rows that are multiplied one by one with the words.
_MAX_SINGLE_ROWS = 2
# Of a weight, this much is unpacked at once: a core's cache holds it.
_TILE_BYTES = 1 << 18
# Tiles are of whole vectors.
_VECTOR = 16
# Number of input axes of the weights that are quantised.
_INPUT_AXES = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight `[in, out]` of G groups; the words' axis J counts from a group's first inputs on.

    Attributes:
        words: `int32[J, G, out]`.
        scale: `float32[G, out]`.
        num_inputs: in, without what fills the last group.
        out_shape: what the axis out stands for.
    """

    words: jax.Array
    scale: jax.Array
    num_inputs: int = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})

    def times(self, x: jax.Array, batch_invariant: bool = False) -> jax.Array:
        """`x: [T, in]` times the weight, `float32[T, out]`."""
        # Tied to `x`, so that no loop around this, as that of decoding, unpacks the weight before
        # it begins and keeps it.
        x, words, scale = jax.lax.optimization_barrier((x, self.words, self.scale))
        num_rows, num_groups = x.shape[0], scale.shape[0]
        x = jnp.pad(x, ((0, 0), (0, num_groups * _GROUP - self.num_inputs)))
        x = x.astype(jnp.float32).reshape(num_rows, num_groups, _WORDS, _PER_WORD)
        on_cpu = jax.default_backend() == "cpu"
        if on_cpu and not batch_invariant and num_rows <= _MAX_SINGLE_ROWS:
            rows = [_row_times(x[i : i + 1], words, scale) for i in range(num_rows)]
            return jnp.concatenate(rows)
        # As `_unpack` orders the inputs.
        x = x.transpose(0, 3, 2, 1).reshape(num_rows, -1)
        return _times(x, words, scale, batch_invariant)

    def outputs(self, ids: jax.Array) -> jax.Array:
        """The weights of some outputs, `int32[T]` -> `float32[T, in]`."""
        unpacked = _unpack(self.words[:, :, ids], self.scale[:, ids])
        return unpacked.transpose(3, 2, 1, 0).reshape(ids.shape[0], -1)[:, : self.num_inputs]


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError if there is no such quantisation."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(
            f"{quantization=} must be None or one of {', '.join(map(repr, QUANTIZATIONS))}"
        )


def quantize_parameter(
    name: str, value: jax.Array, config: LlamaConfig
) -> jax.Array | QuantizedWeight:
    """A parameter of `Llama` as int8, if it is one that products read, or else as it is."""
    if name in _INPUT_AXES:
        axes = _INPUT_AXES[name]
        num_inputs = math.prod(value.shape[:axes])
        return quantize(value.reshape(num_inputs, -1), value.shape[axes:])
    if name == "head" or (name == "embed" and config.tie_embeddings):
        return quantize(value.T, value.shape[:1])
    return value


@partial(jax.jit, static_argnames="out_shape")
def quantize(weight: jax.Array, out_shape: tuple[int, ...]) -> QuantizedWeight:
    """A weight `[in, out]`, each number rounded to the nearest that its group can hold."""
    num_inputs, num_outputs = weight.shape
    weight = jnp.pad(weight.astype(jnp.float32), ((0, -num_inputs % _GROUP), (0, 0)))
    groups = weight.reshape(-1, _GROUP, num_outputs)
    scale = jnp.max(jnp.abs(groups), axis=1) / 127
    numbers = jnp.round(groups / jnp.where(scale > 0, scale, 1)[:, None])
    # A scale so small that it is imprecise could lead beyond eight bits.
    numbers = jnp.clip(numbers, -127, 127).astype(jnp.int32)
    numbers = numbers.reshape(-1, _WORDS, _PER_WORD, num_outputs)
    words = jnp.zeros_like(numbers[:, :, 0])
    for place in range(_PER_WORD):
        words = words | ((numbers[:, :, place] & 0xFF) << (8 * place))
    return QuantizedWeight(
        words=words.swapaxes(0, 1), scale=scale, num_inputs=num_inputs, out_shape=out_shape
    )


def _unpack(words: jax.Array, scale: jax.Array) -> jax.Array:
    """`int32[J, G, N]` and `float32[G, N]` -> `float32[4, J, G, N]`."""
    left = jnp.array([24, 16, 8, 0], jnp.int32)[:, None, None, None]
    return ((words << left) >> 24).astype(jnp.float32) * scale


def _row_times(x: jax.Array, words: jax.Array, scale: jax.Array) -> jax.Array:
    """`x: [1, G, J, 4]`, one row -> `[1, N]`."""
    sums = jnp.zeros((1, *scale.shape), jnp.float32)
    for j in range(_WORDS):
        for place in range(_PER_WORD):
            numbers = (words[j] << (24 - 8 * place)) >> 24
            sums = sums + x[:, :, j, place, None] * numbers.astype(jnp.float32)
    # By themselves, or XLA would make them anew for every output; and a product with ones, since
    # its sums over such an axis are slow.
    sums = jax.lax.optimization_barrier(sums * scale)
    return jnp.einsum("g,tgn->tn", jnp.ones(sums.shape[1], sums.dtype), sums)


def _times(x: jax.Array, words: jax.Array, scale: jax.Array, batch_invariant: bool) -> jax.Array:
    """`x: [T, in]`, inputs in the order of `_unpack` -> `[T, N]`."""
    num_inputs, num_outputs = x.shape[1], scale.shape[1]

    def product(words: jax.Array, scale: jax.Array) -> jax.Array:
        weight = _unpack(words, scale).reshape(num_inputs, -1)
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
