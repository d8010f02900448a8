"""What the block-moving TPU kernels share: what they serve, and copies that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .layout import LANES

_IN_FLIGHT = 16
_MAX_IDS = 65536  # of SMEM's 1 MiB


def check_block(kv_cache: jax.Array, num_ids: int) -> None:
    """Check that blocks of this cache can be moved by DMA.

    Raises:
        NotImplementedError: saying why not.
    """
    width = kv_cache.shape[-1]
    if width % LANES:
        raise NotImplementedError(f"rows of {width} elements are not a multiple of {LANES} on TPU")
    if kv_cache.dtype == jnp.float16:
        raise NotImplementedError("Mosaic has no float16 on TPU")
    if num_ids > _MAX_IDS:
        raise NotImplementedError(f"{num_ids} block ids are more than {_MAX_IDS} in one call")


def overlap_copies(
    count: int,
    copy: Callable[[jax.Array], Any],
    wanted: Callable[[jax.Array], Any] | None = None,
) -> None:
    """Run the copies `copy(0) .. copy(count-1)`, all of one size, several at a time.

    They share a semaphore, so that waiting for one says only that as many are done: their order
    is open, and none may depend on another.

    Args:
        count: how many.
        copy: makes the descriptor of a copy.
        wanted: whether a copy is to be made; None means all.
    """

    def when(i: jax.Array, action: Callable[[], None]) -> None:
        if wanted is None:
            action()
        else:
            pl.when(wanted(i))(action)

    @pl.loop(0, count)
    def _(i: jax.Array) -> None:
        if count > _IN_FLIGHT:

            @pl.when(i >= _IN_FLIGHT)
            def _() -> None:
                when(i - _IN_FLIGHT, lambda: copy(i - _IN_FLIGHT).wait())

        when(i, lambda: copy(i).start())

    @pl.loop(max(0, count - _IN_FLIGHT), count)
    def _(i: jax.Array) -> None:
        when(i, lambda: copy(i).wait())
