"""How weights lie in memory for the kernel of `linear`, and those in int8 for all.

In int8, four inputs lie in a 32-bit word, the first in its lowest byte; a group of 32 inputs has a
scale for each output, and its eight words an axis of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

GROUP = 32
NUM_PER_WORD = 4
WORDS_PER_GROUP = GROUP // NUM_PER_WORD
# Of a group of activations in int8: the numbers, a factor, and what sums of products begin with.
WORDS_PER_ROW_GROUP = WORDS_PER_GROUP + 2
# A group of activations in int8 with no larger number counts as nothing.
SMALLEST = 2.0**-100


def panel_width() -> int:
    """Outputs of a panel, W, on this CPU.

    Raises:
        ImportError: Numba is not installed.
    """
    from ..vectors import widest

    return widest() // 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight in Q panels of W outputs, each of which lies in one piece; zeros fill the last one.

    Attributes:
        panels: `float32[Q, in, W]`, or `int32[Q, G, 8, W]` in int8.
        scale: `float32[Q, G, W]` in int8, else None.
        num_inputs: in.
        num_outputs: out, without what fills the last panel.
    """

    panels: jax.Array
    scale: jax.Array | None
    num_inputs: int = field(metadata={"static": True})
    num_outputs: int = field(metadata={"static": True})

    def plain(self) -> tuple[jax.Array, jax.Array | None]:
        """(weight, scale) as `linear` takes them."""
        out = self.num_outputs
        if self.scale is None:
            return self.panels.swapaxes(0, 1).reshape(self.num_inputs, -1)[:, :out], None
        _, num_groups, num_words, _ = self.panels.shape
        words = self.panels.transpose(2, 1, 0, 3).reshape(num_words, num_groups, -1)
        return words[:, :, :out], self.scale.swapaxes(0, 1).reshape(num_groups, -1)[:, :out]

    def outputs(self, ids: jax.Array) -> jax.Array:
        """The weights of some outputs, `int32[T]` -> `float32[T, in]`."""
        panel, lane = ids // self.panels.shape[-1], ids % self.panels.shape[-1]
        if self.scale is None:
            return self.panels[panel, :, lane]
        words, scale = self.panels[panel, :, :, lane], self.scale[panel, :, lane]
        return unpack(words.transpose(2, 1, 0), scale.T)[: self.num_inputs].T


def pack(weight: jax.Array, scale: jax.Array | None, num_inputs: int, width: int) -> PackedWeight:
    """A weight `float32[in, out]`, or `int32[8, G, out]` with its scale, in panels of `width`."""
    num_outputs = weight.shape[-1]

    def cut(array: jax.Array) -> jax.Array:
        padding = ((0, 0),) * (array.ndim - 1)
        array = jnp.pad(array, (*padding, (0, -num_outputs % width)))
        return jnp.moveaxis(array.reshape(*array.shape[:-1], -1, width), -2, 0)

    panels = cut(weight)
    return PackedWeight(
        panels=panels if scale is None else panels.swapaxes(1, 2),
        scale=None if scale is None else cut(scale),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
    )


def unpack_by_place(words: jax.Array, scale: jax.Array) -> jax.Array:
    """`int32[8, G, N]` and `float32[G, N]` -> `float32[4, 8, G, N]`: place, word, group, output."""
    left = jnp.array([24, 16, 8, 0], jnp.int32)[:, None, None, None]
    return ((words << left) >> 24).astype(jnp.float32) * scale


def unpack(words: jax.Array, scale: jax.Array) -> jax.Array:
    """`int32[8, G, N]` and `float32[G, N]` -> `float32[32*G, N]`."""
    return unpack_by_place(words, scale).transpose(2, 1, 0, 3).reshape(-1, scale.shape[1])


@jax.custom_jvp
def rounded_rows(x: jax.Array) -> jax.Array:
    """`x: [T, in]` with each number rounded to one of 255 of its row and group of 32 inputs.

    It has x's own gradient, as if nothing were rounded.
    """
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = groups.reshape(x.shape[0], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    # That of smaller ones might be infinite.
    factor = jnp.where(largest > SMALLEST, 127 / largest, 0)
    numbers = jnp.round(groups * factor) * (largest / 127)
    return numbers.reshape(x.shape[0], -1)[:, : x.shape[1]].astype(x.dtype)


@rounded_rows.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return rounded_rows(*primals), *tangents
