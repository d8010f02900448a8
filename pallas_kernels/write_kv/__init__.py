"""Writing new keys and values into the slots of a paged cache."""

from __future__ import annotations

import jax

from ..dispatch import REFERENCE, XLA, Op
from ..layout import check_cache, check_index_dtype, debug_check_block_ids
from .reference import write_kv_reference
from .xla import write_kv_xla

_OP = Op(
    name="write_kv",
    implementations={REFERENCE: write_kv_reference, XLA: write_kv_xla},
    order={},
)


def write_kv(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Write one key and value per token into its slot.

    A token at offset 0 *opens* its block: the rest of that block is zeroed first, so that what
    a former owner left there (NaN included) can never meet a weight of 0. A slot inside the
    null block is padding and writes nothing. A slot outside `[0, P*B)` is an error in debug
    mode and is otherwise dropped. Slots of live tokens must differ.

    Args:
        kv_cache: `[P, K, B, ROW]`, donated by callers that want no copy of the cache.
        k, v: `[T, K, H]`, cast to the cache's dtype.
        slots: `int32[T]`, `block_id * B + offset`.
        implementation: None picks by platform; "xla" or "reference".

    Returns:
        The cache, `[P, K, B, ROW]`.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"{k.shape=} and {v.shape=} must both be [T, K, H]")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"{slots.shape=} must be one slot per token, ({k.shape[0]},)")
    check_index_dtype(slots=slots)
    check_cache(kv_cache, k.shape[1], k.shape[2])
    num_blocks, _, block_size, _ = kv_cache.shape
    block_ids = slots // block_size
    debug_check_block_ids(block_ids, block_ids != 0, num_blocks)
    if slots.shape[0] == 0:
        return kv_cache
    return _OP(implementation, kv_cache, k, v, slots)
