"""`linear` for CPUs with Numba."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered
from .packed import GROUP, WORDS_PER_ROW_GROUP, PackedWeight, panel_width, rounded_rows


def linear_numba(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
    quantize_x: bool,
) -> jax.Array:
    """See `octavo.pallas_kernels.linear`."""
    del batch_invariant, scale  # it always is; a packed weight has its own
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"{x.dtype=} must be float32")
    name = registered("linear")
    width = panel_width()
    if transposed or not isinstance(weight, PackedWeight):
        raise NotImplementedError("a weight must be packed (`pack_weight`)")
    if weight.panels.shape[-1] != width:
        raise NotImplementedError(f"{weight.panels.shape=} must have panels of {width} on this CPU")
    if weight.scale is None and weight.panels.dtype != jnp.float32:
        raise NotImplementedError(f"{weight.panels.dtype=} must be float32")
    in_int8 = quantize_x and has_dot_products()
    if quantize_x and not in_int8:
        x = rounded_rows(x)
    num_groups = -(-weight.num_inputs // GROUP) if in_int8 else 0
    results = (
        jax.ShapeDtypeStruct((x.shape[0], weight.panels.shape[0] * width), jnp.float32),
        jax.ShapeDtypeStruct((x.shape[0], num_groups * WORDS_PER_ROW_GROUP), jnp.int32),
    )
    factors = jnp.zeros((0, 0, width), jnp.float32) if weight.scale is None else weight.scale
    call = jax.ffi.ffi_call(name, results, vmap_method="sequential")
    y, _ = call(x, weight.panels, factors, jnp.array([num_threads()], jnp.int32))
    return y[:, : weight.num_outputs]


def has_dot_products() -> bool:
    """Whether this CPU multiplies 8-bit numbers; it has Numba."""
    from .. import vectors_int8

    return vectors_int8.has_dot_products()
