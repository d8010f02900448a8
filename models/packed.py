"""Weights of linear layers as the kernels of this machine read them fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from ..pallas_kernels import PackedWeight, pack_weight
from .quantized import INPUT_AXES, QuantizedWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedParameter:
    """A parameter that products read, packed.

    Attributes:
        weight: `[in, out]`.
        out_shape: what the axis out stands for.
    """

    weight: PackedWeight
    out_shape: tuple[int, ...] = field(metadata={"static": True})


def pack_parameter(name: str, value: Any) -> Any:
    """A parameter of `Llama` packed, if it is one that is read so, or else as it is.

    An output head in float32 is read as it is: a row of it is an output, and lies in one piece.
    """
    if isinstance(value, QuantizedWeight):
        weight = _pack(value.words, value.scale, num_inputs=value.num_inputs)
        return PackedParameter(weight=weight, out_shape=value.out_shape)
    if isinstance(value, jax.Array) and name in INPUT_AXES:
        axes = INPUT_AXES[name]
        flat = value.reshape(math.prod(value.shape[:axes]), -1)
        return PackedParameter(weight=_pack(flat, None), out_shape=value.shape[axes:])
    return value


@partial(jax.jit, static_argnames="num_inputs")
def _pack(
    weight: jax.Array, scale: jax.Array | None, num_inputs: int | None = None
) -> PackedWeight:
    packed = pack_weight(weight, scale, num_inputs=num_inputs)
    assert packed is not None  # `Llama.packed` has asked
    return packed
