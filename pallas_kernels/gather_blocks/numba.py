"""Blocks moved on CPUs, by several threads and bit by bit: see `numba_call`.

XLA for CPUs moves bfloat16 as float32: to write a row it turns a whole cache into float32 and back.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from ..cpu_kernels import num_threads, registered


def scatter_blocks_numba(
    kv_cache: jax.Array,
    block_ids: jax.Array,
    blocks: jax.Array,
    layer: int,
    sources: jax.Array | None,
) -> jax.Array:
    """See `octavo.pallas_kernels.scatter_blocks`."""
    if sources is None:
        sources = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    size = prod(kv_cache.shape[1:])
    return move(kv_cache, block_ids, blocks, sources, size, layer=layer, num_layers=blocks.shape[1])


def gather_blocks_numba(kv_cache: jax.Array, block_ids: jax.Array) -> jax.Array:
    """See `octavo.pallas_kernels.gather_blocks`."""
    # Room for what is asked for, behind a null block.
    packed = jnp.zeros((block_ids.shape[0] + 1, *kv_cache.shape[1:]), kv_cache.dtype)
    ids = jnp.arange(1, len(packed), dtype=jnp.int32)
    return move(packed, ids, kv_cache, block_ids, prod(kv_cache.shape[1:]))[1:]


def move(
    target: jax.Array,
    ids: jax.Array,
    source: jax.Array,
    sources: jax.Array,
    size: int,
    *,
    layer: int = 0,
    num_layers: int = 1,
) -> jax.Array:
    """Overwrite pieces of `size` numbers, in the order in which they lie in memory.

    Args:
        target: of any shape.
        ids: `int32[n]`, which pieces of it, all different; 0 for none.
        source: of any shape.
        sources: `int32[n]`, where in it the new ones are, in units of `num_layers` pieces.
        size: numbers in a piece.
        layer: which of those pieces.
        num_layers: how many there are.

    Raises:
        NotImplementedError: there is no such kernel here, or none for pieces like these.
    """
    if size * target.dtype.itemsize % 8:
        raise NotImplementedError(f"{size=} numbers of {target.dtype} are no multiple of 8 bytes")
    call = jax.ffi.ffi_call(
        registered("gather_blocks"),
        jax.ShapeDtypeStruct(target.shape, target.dtype),
        vmap_method="sequential",
        input_output_aliases={0: 0},
    )
    words = size * target.dtype.itemsize // 8
    numbers = jnp.array([layer, num_layers, words, num_threads()], jnp.int32)
    return call(target, ids, sources, source, numbers)
