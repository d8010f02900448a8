"""Weights of linear layers as the kernels of this machine read them fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from ..pallas_kernels import PackedWeight, pack_weight
from .config import LlamaConfig
from .quantized import INPUT_AXES, QuantizedWeight, is_output_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedParameter:
    """A parameter that products read, packed.

    Attributes:
        weight: `[in, out]`.
        out_shape: what the axis out stands for.
        quantize_x: activations are rounded to int8 for the product.
    """

    weight: PackedWeight
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    quantize_x: bool = field(default=False, metadata={"static": True})


def pack_parameter(name: str, value: Any, config: LlamaConfig) -> Any:
    """A parameter of `Llama` packed, if products read it, or else as it is."""
    if isinstance(value, QuantizedWeight):
        weight = _pack(value.words, value.scale, num_inputs=value.num_inputs)
        return PackedParameter(
            weight=weight, out_shape=value.out_shape, quantize_x=value.quantize_x
        )
    if isinstance(value, jax.Array) and name in INPUT_AXES:
        axes = INPUT_AXES[name]
        flat = value.reshape(math.prod(value.shape[:axes]), -1)
        return PackedParameter(weight=_pack(flat, None), out_shape=value.shape[axes:])
    if isinstance(value, jax.Array) and is_output_head(name, config):
        return PackedParameter(weight=_pack(value.T, None), out_shape=value.shape[:1])
    return value


@partial(jax.jit, static_argnames="num_inputs")
def _pack(
    weight: jax.Array, scale: jax.Array | None, num_inputs: int | None = None
) -> PackedWeight:
    packed = pack_weight(weight, scale, num_inputs=num_inputs)
    assert packed is not None  # `Llama.packed` has asked
    return packed
