"""Products of activations with the weights of linear layers, in float32 or int8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cpu_kernels import cpu_kernels
from ..dispatch import NUMBA, REFERENCE, XLA, Op
from .numba import linear_numba
from .packed import GROUP, WORDS_PER_GROUP, PackedWeight, pack, panel_width, rounded_rows, unpack
from .xla import by_rows as by_rows
from .xla import linear_xla


def _linear_reference(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
    quantize_x: bool,
) -> jax.Array:
    del batch_invariant
    if quantize_x:
        x = rounded_rows(x)
    if isinstance(weight, PackedWeight):
        weight, scale = weight.plain()
    if transposed:
        return jnp.matmul(x, weight.T, precision="highest", preferred_element_type=jnp.float32)
    if scale is not None:
        weight = unpack(weight, scale)[: x.shape[1]]
    return jnp.matmul(x, weight, precision="highest").astype(x.dtype)


_OP = Op(
    name="linear",
    implementations={REFERENCE: _linear_reference, NUMBA: linear_numba, XLA: linear_xla},
)


def linear(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    scale: jax.Array | None = None,
    *,
    transposed: bool = False,
    quantize_x: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ weight`, of a weight as it is or of one in int8; or `x @ weight.T`.

    In int8, four inputs lie in a word, the first in its lowest byte, and the words of a group of
    32 inputs have an axis of their own, the first; G is in / 32, rounded up.

    Args:
        x: `[T, in]`.
        weight: `[in, out]`, or `int32[8, G, out]`, or either packed (`pack_weight`).
        scale: `float32[G, out]` factors of an int8 weight, else None.
        transposed: the weight is `[out, in]`, as an embedding that is also the output head; not
            with int8.
        quantize_x: round x to int8 as well, with a factor for every row and group of 32 inputs;
            with an int8 weight only. CPUs with AVX-512 VNNI multiply such numbers fastest.
        batch_invariant: compute every row as if it were alone, so that its bits do not depend on
            what else is computed, on a CPU (XLA promises nothing elsewhere).
        implementation: None picks by platform; "numba" (CPUs, float32 activations, packed
            weights; bits never depend on other rows; it has no gradient), "xla" or "reference".
            A named one never falls back.

    Returns:
        `[T, out]` in x's dtype; in float32 if transposed.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        NotImplementedError: the named implementation cannot serve this call.
    """
    if x.ndim != 2:
        raise ValueError(f"{x.shape=} must be [T, in]")
    if isinstance(weight, PackedWeight):
        num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
        if scale is not None or transposed or x.shape[1] != num_inputs:
            raise ValueError(
                f"{x.shape=}, {scale=} and {transposed=} must be [T, {num_inputs}], None and False "
                "for a packed weight"
            )
    else:
        _check_plain(x.shape[1], weight, scale, transposed)
        num_outputs = weight.shape[0 if transposed else -1]
    if quantize_x and (weight.scale if isinstance(weight, PackedWeight) else scale) is None:
        raise ValueError(f"{quantize_x=} is for int8 weights; give scale or leave it False")
    if 0 in (*x.shape, num_outputs):
        dtype = jnp.float32 if transposed else x.dtype
        return jnp.zeros((x.shape[0], num_outputs), dtype)
    return _OP(implementation, x, weight, scale, batch_invariant, transposed, quantize_x)


def _check_plain(
    num_inputs: int, weight: jax.Array, scale: jax.Array | None, transposed: bool
) -> None:
    """Raises ValueError if shapes and dtypes do not fit together."""
    if scale is None:
        if weight.ndim != 2 or weight.shape[-1 if transposed else 0] != num_inputs:
            expected = "[out, in]" if transposed else "[in, out]"
            raise ValueError(f"{weight.shape=} must be {expected}, in={num_inputs}")
        return
    if transposed:
        raise ValueError("transposed=True is not for int8 weights")
    groups = -(-num_inputs // GROUP)
    if weight.ndim != 3 or weight.shape[:2] != (WORDS_PER_GROUP, groups):
        raise ValueError(f"{weight.shape=} must be [{WORDS_PER_GROUP}, {groups}, out]")
    if weight.dtype != jnp.int32 or scale.dtype != jnp.float32:
        raise ValueError(f"{weight.dtype=} must be int32 and {scale.dtype=} float32")
    if scale.shape != weight.shape[1:]:
        raise ValueError(f"{scale.shape=} must be {weight.shape[1:]}")


def pack_weight(
    weight: jax.Array, scale: jax.Array | None = None, *, num_inputs: int | None = None
) -> PackedWeight | None:
    """The weight as the CPU's kernel reads it fastest, from one end to the other.

    Args:
        weight: `float32[in, out]`, or `int32[8, G, out]`.
        scale: `float32[G, out]` factors of an int8 weight, else None.
        num_inputs: of an int8 weight, if its last group is not full.

    Returns:
        A copy of the weight; None where there is no such kernel.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    axes, expected = (2, "[in, out]") if scale is None else (3, f"[{WORDS_PER_GROUP}, G, out]")
    if weight.ndim != axes:
        raise ValueError(f"{weight.shape=} must be {expected}")
    if num_inputs is None:
        num_inputs = weight.shape[0] if scale is None else weight.shape[1] * GROUP
    _check_plain(num_inputs, weight, scale, False)
    if cpu_kernels() is None or (scale is None and weight.dtype != jnp.float32):
        return None
    return pack(weight, scale, num_inputs, panel_width())
