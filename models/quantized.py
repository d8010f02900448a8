"""Weights of linear layers in int8, with a factor for every group of inputs.

A weight `[in, out]` becomes whole numbers from -127 to 127, and a float32 per output and per group
of 32 inputs: 1.125 bytes per weight instead of 4. Four inputs lie in one 32-bit word, and outputs
side by side: so a CPU unpacks whole vectors, by shifts alone, which compilers do well where they do
bytes badly. In `"int8"` activations stay as they are; in `"w8a8"` those that products read are
rounded likewise, per token and group, at each product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from ..pallas_kernels.linear.packed import GROUP, NUM_PER_WORD, WORDS_PER_GROUP, unpack
from .config import LlamaConfig

QUANTIZATIONS = ("int8", "w8a8")
# Number of input axes of the weights that are quantised.
INPUT_AXES = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight `[in, out]` of G groups; the words' axis J counts from a group's first inputs on.

    Attributes:
        words: `int32[J, G, out]`.
        scale: `float32[G, out]`.
        num_inputs: in, without what fills the last group.
        out_shape: what the axis out stands for.
        quantize_x: activations are rounded to int8 for the product.
    """

    words: jax.Array
    scale: jax.Array
    num_inputs: int = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    quantize_x: bool = field(default=False, metadata={"static": True})

    def outputs(self, ids: jax.Array) -> jax.Array:
        """The weights of some outputs, `int32[T]` -> `float32[T, in]`."""
        return unpack(self.words[:, :, ids], self.scale[:, ids])[: self.num_inputs].T


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError if there is no such quantisation."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(
            f"{quantization=} must be None or one of {', '.join(map(repr, QUANTIZATIONS))}"
        )


def quantize_parameter(
    name: str, value: jax.Array, config: LlamaConfig, quantization: str
) -> jax.Array | QuantizedWeight:
    """A parameter of `Llama` as int8, if it is one that products read, or else as it is."""
    quantize_x = quantization == "w8a8"
    if name in INPUT_AXES:
        axes = INPUT_AXES[name]
        num_inputs = math.prod(value.shape[:axes])
        return quantize(value.reshape(num_inputs, -1), value.shape[axes:], quantize_x)
    if is_output_head(name, config):
        return quantize(value.T, value.shape[:1], quantize_x)
    return value


def is_output_head(name: str, config: LlamaConfig) -> bool:
    """Whether a parameter `[V, D]` makes logits, as an embedding does that is tied."""
    return name == "head" or (name == "embed" and config.tie_embeddings)


@partial(jax.jit, static_argnames=("out_shape", "quantize_x"))
def quantize(
    weight: jax.Array, out_shape: tuple[int, ...], quantize_x: bool = False
) -> QuantizedWeight:
    """A weight `[in, out]`, each number rounded to the nearest that its group can hold."""
    num_inputs, num_outputs = weight.shape
    weight = jnp.pad(weight.astype(jnp.float32), ((0, -num_inputs % GROUP), (0, 0)))
    groups = weight.reshape(-1, GROUP, num_outputs)
    scale = jnp.max(jnp.abs(groups), axis=1) / 127
    numbers = jnp.round(groups / jnp.where(scale > 0, scale, 1)[:, None])
    # A scale so small that it is imprecise could lead beyond eight bits.
    numbers = jnp.clip(numbers, -127, 127).astype(jnp.int32)
    numbers = numbers.reshape(-1, WORDS_PER_GROUP, NUM_PER_WORD, num_outputs)
    words = jnp.zeros_like(numbers[:, :, 0])
    for place in range(NUM_PER_WORD):
        words = words | ((numbers[:, :, place] & 0xFF) << (8 * place))
    return QuantizedWeight(
        words=words.swapaxes(0, 1),
        scale=scale,
        num_inputs=num_inputs,
        out_shape=out_shape,
        quantize_x=quantize_x,
    )
