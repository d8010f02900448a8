"""The one KV-cache layout that every op, platform and tier shares.

A layer's cache is `[P, K, B, ROW]`: P blocks, K KV heads, B slots per block, and one row per
slot with the key in `[:H]` and the value in `[H:2H]`. A block is one contiguous chunk, so that
copying, evicting or transferring it is one memory copy.

Block 0 is the *null block*: it belongs to no sequence, holds zeros, and stands wherever a table
has nothing to say. Slots are numbered through the pool: `slot = block_id * B + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import checkify

NULL_BLOCK = 0
LANES = 128


def row_width(head_size: int, platform: str) -> int:
    """Elements of one row: 2H, rounded up to 128 lanes on TPU.

    An unpadded row that is no multiple of 128 makes XLA choose a transposed parameter layout
    on TPU and copy the whole cache on every call.
    """
    width = 2 * head_size
    return -(-width // LANES) * LANES if platform == "tpu" else width


def cache_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, platform: str
) -> tuple[int, int, int, int]:
    """Shape `[P, K, B, ROW]` of one layer's cache.

    Raises:
        ValueError: a size is not positive, or there is no block beside the null block.
    """
    sizes = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_size": head_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_blocks < 2:
        raise ValueError(f"{num_blocks=} must be at least 2: block 0 is the null block")
    return num_blocks, num_kv_heads, block_size, row_width(head_size, platform)


def check_cache(kv_cache: jax.Array, num_kv_heads: int, head_size: int) -> None:
    """Check the static facts of one layer's cache against the heads that use it.

    Raises:
        ValueError: the cache is not `[P, K, B, ROW]` with ROW at least 2H.
    """
    if kv_cache.ndim != 4:
        raise ValueError(f"{kv_cache.shape=} must be [P, K, B, ROW]")
    if kv_cache.shape[1] != num_kv_heads:
        raise ValueError(f"{kv_cache.shape=} must have {num_kv_heads} KV heads on axis 1")
    if kv_cache.shape[3] < 2 * head_size:
        raise ValueError(f"{kv_cache.shape=} must have rows of at least 2H={2 * head_size}")


def check_index_dtype(**arrays: jax.Array) -> None:
    """Check that index arrays are int32.

    Raises:
        ValueError: naming the first array that is not.
    """
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, expected int32")


def safe_block_ids(block_ids: jax.Array, num_blocks: int) -> jax.Array:
    """Send every id outside `[0, P)` to the null block.

    JAX clamps an id past the end to the last block and wraps a negative one, and either would
    read another sequence's data.
    """
    inside = (block_ids >= 0) & (block_ids < num_blocks)
    return jnp.where(inside, block_ids, NULL_BLOCK)


debug_checks = jax.make_user_context(default_value=False)
"""Debug mode: `with debug_checks(True):` ops check their block ids, under `checkify.checkify`.

A context and not `checkify.debug_check` everywhere: what that leaves behind in a program holds a
number which depends on everything traced before, so no program would be found again in JAX's
compilation cache.
"""


def debug_check(ok: jax.Array, message: str) -> None:
    """In debug mode fail with `message` unless `ok: bool[]`; otherwise do nothing."""
    if debug_checks.value:
        checkify.check(ok, message)


def debug_check_block_ids(block_ids: jax.Array, used: jax.Array, num_blocks: int) -> None:
    """In debug mode fail on a used id outside `[0, P)`; otherwise do nothing."""
    if not debug_checks.value:
        return
    bad = used & ((block_ids < 0) | (block_ids >= num_blocks))
    checkify.check(
        ~jnp.any(bad),
        "a block id in use is outside [0, {p}): smallest {lo}, largest {hi}",
        p=jnp.int32(num_blocks),
        lo=jnp.min(jnp.where(bad, block_ids, num_blocks), initial=num_blocks),
        hi=jnp.max(jnp.where(bad, block_ids, -1), initial=-1),
    )


QUANTISED_DTYPES = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def check_scales(
    kv_cache: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """The scales `float32[K]` of a quantised cache's keys and values, or None if all are 1.

    Raises:
        ValueError: one scale is given without the other, they are not `float32[K]`, the cache is
            not quantised, or it is int8 and there are none.
    """
    quantised = kv_cache.dtype in QUANTISED_DTYPES
    if k_scale is None and v_scale is None:
        if kv_cache.dtype == jnp.int8:
            raise ValueError("an int8 cache needs k_scale and v_scale: see `kv_scales`")
        return None
    if k_scale is None or v_scale is None:
        raise ValueError("k_scale and v_scale must be given together")
    if not quantised:
        raise ValueError(
            f"a cache of {kv_cache.dtype} takes no scales: int8 and float8_e4m3fn ones do"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.shape != kv_cache.shape[1:2] or scale.dtype != jnp.float32:
            raise ValueError(
                f"{name} is {scale.dtype}{list(scale.shape)}, expected float32[{kv_cache.shape[1]}]"
            )
    return k_scale, v_scale


def init_kv_cache(
    num_layers: int, shape: Sequence[int], dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, ...]:
    """A zeroed cache: one array `[P, K, B, ROW]` per layer.

    Zeros, not garbage: an unused slot is multiplied by a weight of 0, and 0 x NaN is NaN.
    """
    return tuple(jnp.zeros(tuple(shape), dtype) for _ in range(num_layers))
