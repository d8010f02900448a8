"""The copies of the prefill kernel: blocks of the cache in, rows of queries in, of outputs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiles_plan import Plan


def when(condition: Any) -> Any:
    """`pl.when`, decided at once if the condition is a Python bool."""
    if isinstance(condition, bool):
        return lambda fn: fn() if condition else None
    return pl.when(condition)


class BlockCopies(NamedTuple):
    """Blocks on their way from the cache into a half of the buffer."""

    kv_ref: Any  # HBM [P, K, B, ROW]
    buffer_ref: Any  # [2, K, C, ROW]
    semaphores: Any  # DMA[2, pages]
    plan: Plan

    def _copy(self, ids_ref: Any, column: Any, half: Any, page: Any) -> Any:
        block_size = self.plan.block_size
        slots = pl.ds(pl.multiple_of(page * block_size, block_size), block_size)
        return pltpu.make_async_copy(
            self.kv_ref.at[ids_ref[0, column + page]],
            self.buffer_ref.at[half, :, slots],
            self.semaphores.at[half, page],
        )

    def _each(self, number: Any, do: Callable[[Any], None]) -> None:
        """Of `number` pages; those of a whole chunk are unrolled."""
        pages = self.plan.pages

        @when(number < pages)
        def _() -> None:
            jax.lax.fori_loop(0, number, lambda page, carry: do(page), None)

        @when(number == pages)
        def _() -> None:
            for page in range(pages):
                do(page)

    def start(self, ids_ref: Any, column: Any, half: Any, number: Any) -> None:
        """Start copying `number` blocks, from a column of a table into half of the buffer."""

        # 0 x NaN is NaN: what is read past the copied blocks must be finite.
        @when(number < self.plan.pages)
        def _() -> None:
            zeros = jnp.zeros(self.buffer_ref.shape[1:], self.buffer_ref.dtype)
            self.buffer_ref[half] = zeros

        self._each(number, lambda page: self._copy(ids_ref, column, half, page).start())

    def wait(self, ids_ref: Any, half: Any, number: Any) -> None:
        """Wait for `number` blocks in half of the buffer."""
        self._each(number, lambda page: self._copy(ids_ref, 0, half, page).wait())


class RowCopies(NamedTuple):
    """Rows of tokens on their way between HBM and VMEM, as many as a tile has."""

    hbm_ref: Any  # [T, W/128 x N, 128]
    vmem_ref: Any  # [tile, W/128 x N, 128]
    semaphore: Any
    inwards: bool

    def start(self, token: Any, count: Any) -> None:
        """Start copying the rows of `count` tokens, the first of them `token` in HBM."""
        self._by_size(count, lambda offset, size: self._copy(token, offset, size).start())

    def wait(self, token: Any, count: Any) -> None:
        """Wait for what `start` was given."""
        self._by_size(count, lambda offset, size: self._copy(token, offset, size).wait())

    def _copy(self, token: Any, offset: Any, size: int) -> Any:
        hbm = self.hbm_ref.at[pl.ds(token + offset, size)]
        vmem = self.vmem_ref.at[pl.ds(offset, size)]
        source, target = (hbm, vmem) if self.inwards else (vmem, hbm)
        return pltpu.make_async_copy(source, target, self.semaphore)

    def _by_size(self, number: Any, do: Callable[[Any, int], None]) -> None:
        """`do(offset, size)` for static sizes that make up `number` rows."""
        for bit in range(min(self.vmem_ref.shape[0], self.hbm_ref.shape[0]).bit_length()):

            @when((number >> bit) & 1 == 1)
            def _(bit: int = bit) -> None:
                do((number >> (bit + 1)) << (bit + 1), 1 << bit)
