"""What the kernels need of a cache row, in whole lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...chips import Chip
from ...layout import LANES
from .knobs import DecodeKnobs, Sizes, TilesKnobs, vmem_limit

_SUBLANES = 8


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """The lanes that hold the key and the value of a row, each rounded to whole vectors.

    A part may hold lanes of the other or of padding: queries have zeros there, and what they
    add to an output is cut off.

    Attributes:
        key_width: lanes from 0 on that hold the key.
        value_begin: first lane, a multiple of 128, of those that hold the value.
        value_width: number of them.
        product_dtype: what the matrix unit multiplies.
    """

    key_width: int
    value_begin: int
    value_width: int
    product_dtype: Any

    @classmethod
    def of(cls, kv_cache: jax.Array, head_size: int) -> RowParts:
        begin = head_size // LANES * LANES
        exact = kv_cache.dtype.itemsize == 4
        return cls(
            key_width=-(-head_size // LANES) * LANES,
            value_begin=begin,
            value_width=-(-2 * head_size // LANES) * LANES - begin,
            product_dtype=jnp.float32 if exact else jnp.bfloat16,
        )

    @property
    def precision(self) -> jax.lax.Precision:
        exact = self.product_dtype == jnp.float32
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def key(self, kv: jax.Array) -> jax.Array:
        """Keys `[..., C, key_width]` of rows `[..., C, ROW]`."""
        return kv[..., : self.key_width].astype(self.product_dtype)

    def value(self, kv: jax.Array) -> jax.Array:
        """Values `[..., C, value_width]` of rows `[..., C, ROW]`."""
        end = self.value_begin + self.value_width
        return kv[..., self.value_begin : end].astype(self.product_dtype)


def check_supported(
    kv_cache: jax.Array, head_size: int, knobs: DecodeKnobs | TilesKnobs, sizes: Sizes, chip: Chip
) -> None:
    """Check what the wrapper cannot know.

    Raises:
        NotImplementedError: the kernels cannot serve such a cache on this chip.
    """
    dtypes = (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
    if kv_cache.dtype not in dtypes:
        raise NotImplementedError(f"{kv_cache.dtype=} must be bfloat16, float32, int8 or e4m3")
    block_size, width = kv_cache.shape[2:]
    if width % LANES:
        raise NotImplementedError(f"rows of {width} are no multiple of {LANES}: see row_width")
    if head_size % _SUBLANES:
        raise NotImplementedError(f"{head_size=} must be a multiple of {_SUBLANES}")
    if block_size < _SUBLANES or block_size & (block_size - 1):
        raise NotImplementedError(f"{block_size=} must be a power of two of at least {_SUBLANES}")
    needed, limit = knobs.vmem_bytes(sizes), vmem_limit(chip)
    if needed > limit:
        raise NotImplementedError(
            f"blocks of {block_size} x {sizes.token_bytes} bytes need {needed >> 20} MiB of VMEM "
            f"with {knobs}; {chip.name} has {limit >> 20} MiB"
        )
