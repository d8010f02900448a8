# The kernels need the Mosaic GPU of JAX 0.12; type checkers also see the one of JAX 0.10.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

"""What the cache-moving GPU kernels share: the chips they run on, and moves through registers."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .chips import require_chip

THREADS = 128  # of a Mosaic GPU program
VECTOR_BYTES = 16
_CHUNK_BYTES = 16 << 10  # 128 bytes of each thread in flight


def check_gpu() -> None:
    """Check that the chip and this JAX run the kernels.

    Raises:
        NotImplementedError: the chip is older than sm_80, or JAX older than 0.11.
    """
    require_chip("gpu")
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"JAX {jax.__version__} is older than 0.11: no such GPU kernel")


def chunks_of(num_elements: int, itemsize: int) -> tuple[int, Any]:
    """Cut a block into equal chunks, one for a program: `(chunk elements, their layout)`.

    Raises:
        NotImplementedError: 128 threads cannot share the block evenly.
    """
    if num_elements % THREADS:
        raise NotImplementedError(
            f"blocks of {num_elements} elements are not a multiple of {THREADS} on GPU"
        )
    vector = math.gcd(num_elements // THREADS, VECTOR_BYTES // itemsize)
    units = num_elements // (THREADS * vector)
    most = max(1, _CHUNK_BYTES // (THREADS * vector * itemsize))
    chunk = max(n for n in range(1, min(units, most) + 1) if units % n == 0)
    chunk *= THREADS * vector
    return chunk, plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector)


def store(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value` without a check for a bank-conflict-free way, which some layouts lack."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11
        ref[...] = value


def move(source: Any, target: Any, layout: Any) -> None:
    """Copy between global memory by way of registers."""
    store(target, plgpu.load(source, layout=layout, optimized=False))
