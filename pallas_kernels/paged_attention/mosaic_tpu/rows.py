"""What the kernels need of a cache row, in whole lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...chips import Chip
from ...layout import LANES
from .knobs import DecodeKnobs, Sizes, TilesKnobs, vmem_limit


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


def check_vmem(knobs: DecodeKnobs | TilesKnobs, sizes: Sizes, chip: Chip) -> None:
    """Check that the buffers fit into the chip's VMEM.

    Raises:
        NotImplementedError: they do not.
    """
    needed, limit = knobs.vmem_bytes(sizes), vmem_limit(chip)
    if needed > limit:
        raise NotImplementedError(
            f"a block of {sizes.block_size} x {sizes.token_bytes} bytes needs {needed >> 20} MiB "
            f"of VMEM with {knobs}; {chip.name} has {limit >> 20}"
        )
