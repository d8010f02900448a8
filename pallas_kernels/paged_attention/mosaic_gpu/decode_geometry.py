"""Shapes inside the decode kernel, from the shapes of its call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

# Moved to a bfloat16's place, the bits of an e4m3 number have their exponent off by 127 - 7.
E4M3_EXPONENT = 120


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static facts of one call. A word is 16 bits: one number, or two of an 8-bit cache.

    Attributes:
        groups: G.
        head_size: H.
        num_kv_heads: K.
        block_size: B.
        cache_dtype: of the stored numbers.
        scaled_e4m3: e4m3 operands are 2**-120 of the stored numbers.
    """

    groups: int
    head_size: int
    num_kv_heads: int
    block_size: int
    cache_dtype: Any
    scaled_e4m3: bool

    @property
    def parts(self) -> int:
        """Operands per word."""
        return 2 if self.cache_dtype.itemsize == 1 else 1

    @property
    def compute_dtype(self) -> Any:
        return self.cache_dtype if self.parts == 1 else jnp.dtype(jnp.bfloat16)

    @property
    def word_dtype(self) -> Any:
        return self.cache_dtype if self.parts == 1 else jnp.dtype(jnp.uint16)

    @property
    def kv_exponent(self) -> int:
        """Power of two by which operands from the cache are too small."""
        is_scaled = self.scaled_e4m3 and self.cache_dtype == jnp.float8_e4m3fn
        return E4M3_EXPONENT if is_scaled else 0

    @property
    def query_exponent(self) -> int:
        """Power of two put into Q, so that products with such operands are no subnormals."""
        return self.kv_exponent // 2

    @property
    def head_words(self) -> int:
        return self.head_size // self.parts

    @property
    def row_words(self) -> int:
        return 2 * self.head_words

    @property
    def key_words(self) -> int:
        """Words read as a key, in steps of `mma`: past the key they meet zeros of Q."""
        return -(-self.head_words // 16) * 16

    @property
    def value_words(self) -> int:
        """Words read as a value, 8 for each warp: those before the value are not returned."""
        return -(-self.head_words // 32) * 32

    @property
    def rows(self) -> int:
        """Query rows of the products, R."""
        return -(-self.groups // 16) * 16

    @property
    def out_rows(self) -> int:
        """Rows written: at least G, and a whole number of words for each of 128 threads."""
        step = 128 // math.gcd(self.value_words, 128)
        return -(-self.groups // step) * step

    def copy_rows(self, tile: int) -> int:
        """Rows of one copy: a block, or the part of one that is a tile."""
        return min(self.block_size, tile)

    def swizzle_words(self, tile: int, use_tma: bool) -> int:
        """Words of a row of a swizzled tile: keys and values must both start at a tile.

        `cp.async` gives each of four warps whole tiles of 8 rows, which a copy of few rows only
        has if they are narrow; 0 where they cannot be narrow enough.
        """
        width = math.gcd(self.key_words, self.row_words - self.value_words, 64)
        tile_rows = self.copy_rows(tile) // 8
        while not use_tma and width >= 16 and self.row_words // width * tile_rows % 4:
            width //= 2
        return width if width >= 16 else 0

    def fixed_bytes(self, tile: int) -> int:
        """Shared memory beside the stages: weights, output, what reductions and barriers take."""
        return self.rows * tile * 2 + self.rows * self.value_words * 4 + 4096
