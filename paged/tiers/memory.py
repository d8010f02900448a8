"""Host memory that JAX reads on a CPU where it lies."""

from __future__ import annotations

from math import prod

import numpy as np

_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """As `numpy.empty`, at an address from which JAX needs no copy."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)
