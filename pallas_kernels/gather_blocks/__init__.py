"""Packing whole blocks into one array and back: what a transfer to another tier moves."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..chips import require_chip
from ..dispatch import MOSAIC_GPU, MOSAIC_TPU, NUMBA, REFERENCE, XLA, Op
from ..layout import NULL_BLOCK, check_index_dtype, debug_check_block_ids, safe_block_ids
from .numba import gather_blocks_numba, scatter_blocks_numba
from .reference import gather_blocks_reference, scatter_blocks_reference
from .targets import distinct_targets
from .xla import gather_blocks_xla, scatter_blocks_xla


# Mosaic is imported when it is called: importing octavo must not.
def _gather_mosaic_gpu(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    require_chip("gpu")
    from .mosaic_gpu import gather_blocks_mosaic_gpu

    return gather_blocks_mosaic_gpu(kv_cache, block_ids)


def _gather_mosaic_tpu(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    require_chip("tpu")
    from .mosaic_tpu import gather_blocks_mosaic_tpu

    return gather_blocks_mosaic_tpu(kv_cache, block_ids)


def _scatter_mosaic_gpu(kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array) -> jax.Array:
    require_chip("gpu")
    from .mosaic_gpu import scatter_blocks_mosaic_gpu

    return scatter_blocks_mosaic_gpu(kv_cache, block_ids, blocks)


def _scatter_mosaic_tpu(kv_cache: jax.Array, block_ids: jax.Array, blocks: jax.Array) -> jax.Array:
    require_chip("tpu")
    from .mosaic_tpu import scatter_blocks_mosaic_tpu

    return scatter_blocks_mosaic_tpu(kv_cache, block_ids, blocks)


_GATHER = Op(
    name="gather_blocks",
    implementations={
        REFERENCE: gather_blocks_reference,
        XLA: gather_blocks_xla,
        NUMBA: gather_blocks_numba,
        MOSAIC_GPU: _gather_mosaic_gpu,
        MOSAIC_TPU: _gather_mosaic_tpu,
    },
)


def _of_layer(
    scatter: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, jax.Array, jax.Array, int, jax.Array | None], jax.Array]:
    """One that takes a layer's blocks, for blocks of several layers."""

    def scatter_layer(
        kv_cache: jax.Array,
        block_ids: jax.Array,
        blocks: jax.Array,
        layer: int,
        sources: jax.Array | None,
    ) -> jax.Array:
        own = blocks[:, layer] if sources is None else blocks[sources, layer]
        return scatter(kv_cache, block_ids, own)

    return scatter_layer


_SCATTER = Op(
    name="scatter_blocks",
    implementations={
        REFERENCE: _of_layer(scatter_blocks_reference),
        XLA: _of_layer(scatter_blocks_xla),
        NUMBA: scatter_blocks_numba,
        MOSAIC_GPU: _of_layer(_scatter_mosaic_gpu),
        MOSAIC_TPU: _of_layer(_scatter_mosaic_tpu),
    },
)


def gather_blocks(
    kv_cache: jax.Array, block_ids: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Pack blocks into one array, in the order of their ids.

    The null block's id is padding and gives the null block, zeros. An id outside `[0, P)` is an
    error in debug mode and otherwise gives the null block too.

    Args:
        kv_cache: `[P, K, B, ROW]`.
        block_ids: `int32[n]`; an id may occur more than once.
        implementation: None picks by platform; "numba" (CPUs), "mosaic_gpu", "mosaic_tpu", "xla"
            or "reference". A named one never falls back.

    Returns:
        The blocks, `[n, K, B, ROW]`.

    Raises:
        ValueError: the cache is not `[P, K, B, ROW]`, or `block_ids` is not `int32[n]`.
        NotImplementedError: the named implementation cannot serve this call.
    """
    _check(kv_cache, block_ids)
    if block_ids.shape[0] == 0:
        return kv_cache[:0]
    return _GATHER(implementation, kv_cache, safe_block_ids(block_ids, kv_cache.shape[0]))


def scatter_blocks(
    kv_cache: jax.Array,
    block_ids: jax.Array,
    blocks: jax.Array,
    *,
    layer: int | None = None,
    sources: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Put packed blocks into the cache: the inverse of `gather_blocks`.

    The null block's id is padding and writes nothing. An id outside `[0, P)` is an error in debug
    mode and is otherwise dropped. Of blocks with one id the last stays.

    Args:
        kv_cache: `[P, K, B, ROW]`, donated by callers that want no copy of the cache.
        block_ids: `int32[n]`.
        blocks: `[n, K, B, ROW]` of the cache's dtype, or `[n, L, K, B, ROW]` with `layer`.
        layer: which layer's of the blocks, in `[0, L)`.
        sources: `int32[n]`, which of any number of blocks go there; None for all in their order.
            One outside writes nothing.
        implementation: None picks by platform; "numba" (CPUs), "mosaic_gpu", "mosaic_tpu", "xla"
            or "reference". A named one never falls back.

    Returns:
        The cache, `[P, K, B, ROW]`.

    Raises:
        ValueError: the cache is not `[P, K, B, ROW]`, `block_ids` is not `int32[n]`, or `blocks`
            has not the shape and dtype of that many blocks, or no such layer.
        NotImplementedError: the named implementation cannot serve this call.
    """
    _check(kv_cache, block_ids)
    if layer is None:
        layer, blocks = 0, blocks[:, None]
    elif blocks.ndim != 5 or not 0 <= layer < blocks.shape[1]:
        raise ValueError(f"{blocks.shape=} must be [n, L, K, B, ROW] with {layer=} in [0, L)")
    count = block_ids.shape[0] if sources is None else blocks.shape[0]
    shape = (count, *blocks.shape[1:2], *kv_cache.shape[1:])
    if blocks.shape != shape or blocks.dtype != kv_cache.dtype:
        raise ValueError(
            f"blocks is {blocks.dtype}{list(blocks.shape)}, expected {kv_cache.dtype}{list(shape)}"
        )
    if sources is not None:
        check_index_dtype(sources=sources)
        if sources.shape != block_ids.shape:
            raise ValueError(f"{sources.shape=} must be {block_ids.shape=}")
        block_ids = jnp.where((sources >= 0) & (sources < count), block_ids, NULL_BLOCK)
    if block_ids.shape[0] == 0:
        return kv_cache
    ids = distinct_targets(block_ids, kv_cache.shape[0])
    return _SCATTER(implementation, kv_cache, ids, blocks, layer, sources)


def _check(kv_cache: jax.Array, block_ids: jax.Array) -> None:
    if kv_cache.ndim != 4:
        raise ValueError(f"{kv_cache.shape=} must be [P, K, B, ROW]")
    if block_ids.ndim != 1:
        raise ValueError(f"{block_ids.shape=} must be a vector")
    check_index_dtype(block_ids=block_ids)
    debug_check_block_ids(block_ids, block_ids != NULL_BLOCK, kv_cache.shape[0])
