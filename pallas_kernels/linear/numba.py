"""`linear` for CPUs with Numba."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered
from .packed import PackedWeight, panel_width


def linear_numba(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
) -> jax.Array:
    """See `octavo.pallas_kernels.linear`."""
    del batch_invariant  # it always is
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"{x.dtype=} must be float32")
    name = registered("linear")
    width = panel_width()
    no_scale = jnp.zeros((0, 0, width), jnp.float32)
    if isinstance(weight, PackedWeight):
        if weight.panels.shape[-1] != width:
            raise NotImplementedError(
                f"{weight.panels.shape=} must have panels of {width} on this CPU"
            )
        if weight.scale is None and weight.panels.dtype != jnp.float32:
            raise NotImplementedError(f"{weight.panels.dtype=} must be float32")
        operands = weight.panels, no_scale if weight.scale is None else weight.scale
        num_outputs, size = weight.num_outputs, weight.panels.shape[0] * width
    elif not transposed:
        raise NotImplementedError("a weight must be packed (`pack_weight`), or transposed")
    else:
        num_outputs = size = weight.shape[0]
        if weight.dtype != jnp.float32:
            raise NotImplementedError(f"{weight.dtype=} must be float32")
        if x.shape[1] % 16 or size < width:
            raise NotImplementedError(
                f"{weight.shape=} must have at least {width} outputs and a multiple of 16 inputs"
            )
        operands = weight, no_scale
    result = jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32)
    call = jax.ffi.ffi_call(name, result, vmap_method="sequential")
    numbers = jnp.array([num_threads(), transposed], jnp.int32)
    return call(x, *operands, numbers)[:, :num_outputs]
