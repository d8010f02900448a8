"""`linear` for CPUs with Numba."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered


def linear_numba(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    batch_invariant: bool,
    transposed: bool,
) -> jax.Array:
    """See `octavo.pallas_kernels.linear`."""
    del batch_invariant  # it always is
    if x.dtype != jnp.float32 or (scale is None and weight.dtype != jnp.float32):
        raise NotImplementedError(f"{x.dtype=} and {weight.dtype=} must be float32")
    if transposed and x.shape[1] % 16:
        raise NotImplementedError(f"{x.shape=} must have a multiple of 16 inputs if transposed")
    name = registered("linear")
    num_outputs = weight.shape[0 if transposed else -1]
    if scale is None:
        scale = jnp.zeros((0, num_outputs), jnp.float32)
    result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32)
    call = jax.ffi.ffi_call(name, result, vmap_method="sequential")
    return call(x, weight, scale, jnp.array([num_threads(), transposed], jnp.int32))
