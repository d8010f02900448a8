"""Writing new keys and values into the slots of a paged cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..chips import require_chip
from ..dispatch import MOSAIC_GPU, MOSAIC_TPU, NUMBA, REFERENCE, XLA, Op
from ..layout import (
    QUANTISED_DTYPES,
    check_cache,
    check_index_dtype,
    check_scales,
    debug_check_block_ids,
)
from ..quantise import quantise
from .numba import write_kv_numba
from .reference import write_kv_reference
from .xla import write_kv_xla


# Mosaic is imported when it is called: importing octavo must not.
def _mosaic_gpu(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    require_chip("gpu")
    from .mosaic_gpu import write_kv_mosaic_gpu

    return write_kv_mosaic_gpu(kv_cache, k, v, slots)


def _mosaic_tpu(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    require_chip("tpu")
    from .mosaic_tpu import write_kv_mosaic_tpu

    return write_kv_mosaic_tpu(kv_cache, k, v, slots)


_OP = Op(
    name="write_kv",
    implementations={
        REFERENCE: write_kv_reference,
        XLA: write_kv_xla,
        NUMBA: write_kv_numba,
        MOSAIC_GPU: _mosaic_gpu,
        MOSAIC_TPU: _mosaic_tpu,
    },
)


def write_kv(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Write one key and value per token into its slot.

    A token at offset 0 *opens* its block: the rest of that block is zeroed first, so that what
    a former owner left there (NaN included) can never meet a weight of 0. A slot inside the
    null block is padding and writes nothing. A slot outside `[0, P*B)` is an error in debug
    mode and is otherwise dropped. Slots of live tokens must differ.

    A quantised cache (int8, float8_e4m3fn) gets `round(x / scale)`, cut off at the largest
    number of its dtype; give `paged_attention` the same scales.

    Args:
        kv_cache: `[P, K, B, ROW]`, donated by callers that want no copy of the cache.
        k, v: `[T, K, H]`, cast to the cache's dtype.
        slots: `int32[T]`, `block_id * B + offset`.
        k_scale, v_scale: `float32[K]` of a quantised cache, from `kv_scales`. None means 1,
            which int8 refuses.
        implementation: None picks by platform; "numba" (CPUs), "mosaic_gpu", "mosaic_tpu", "xla"
            or "reference". A named one never falls back.

    Returns:
        The cache, `[P, K, B, ROW]`.

    Raises:
        ValueError: shapes, dtypes or scales do not fit together.
        NotImplementedError: the named implementation cannot serve this call.
    """
    if k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"{k.shape=} and {v.shape=} must both be [T, K, H]")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"{slots.shape=} must be one slot per token, ({k.shape[0]},)")
    check_index_dtype(slots=slots)
    check_cache(kv_cache, k.shape[1], k.shape[2])
    scales = check_scales(kv_cache, k_scale, v_scale)
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    block_ids = slots // block_size
    debug_check_block_ids(block_ids, block_ids != 0, num_blocks)
    if slots.shape[0] == 0:
        return kv_cache
    if kv_cache.dtype in QUANTISED_DTYPES:
        # Without scales too: a plain cast to float8_e4m3fn does not saturate.
        k_scale, v_scale = scales or (jnp.ones(num_kv_heads, jnp.float32),) * 2
        k, v = quantise(k, k_scale, kv_cache.dtype), quantise(v, v_scale, kv_cache.dtype)
    return _OP(implementation, kv_cache, k, v, slots)
