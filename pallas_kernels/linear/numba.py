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
    factors = jnp.zeros((0, 0, width), jnp.float32) if weight.scale is None else weight.scale
    result = jax.ShapeDtypeStruct((x.shape[0], weight.panels.shape[0] * width), jnp.float32)
    call = jax.ffi.ffi_call(name, result, vmap_method="sequential")
    threads = jnp.array([num_threads()], jnp.int32)
    return call(x, weight.panels, factors, threads)[:, : weight.num_outputs]
