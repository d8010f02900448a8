"""Where blocks lie between a device and the tiers below it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Host memory from and to which a device copies by itself, while it computes.

    Attributes:
        host: page-locked memory, JAX's memory kind `pinned_host`; None where the device is the
            host.
        device: the device's own.
    """

    host: Sharding | None
    device: Sharding

    @classmethod
    def of(cls, device: Any) -> Staging:
        """That of a device, as far as its platform has any."""
        kinds = [memory.kind for memory in device.addressable_memories()]
        host = None
        if device.platform != "cpu" and "pinned_host" in kinds:
            host = SingleDeviceSharding(device, memory_kind="pinned_host")
        return cls(host=host, device=SingleDeviceSharding(device))

    def out(self, blocks: jax.Array) -> jax.Array:
        """Blocks on their way to the host, in a program."""
        return blocks if self.host is None else jax.device_put(blocks, self.host)

    def into(self, blocks: jax.Array) -> jax.Array:
        """Blocks that have come from the host, in a program."""
        return blocks if self.host is None else jax.device_put(blocks, self.device)

    def staged(self, blocks: Any) -> Any:
        """Blocks in host memory where the device can fetch them; on whatever thread has them."""
        return blocks if self.host is None else jax.device_put(blocks, self.host)

    def like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What stands for `staged` blocks when a program is compiled."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.host)


# What JAX reads on a CPU where it lies begins at such an address.
_ALIGNMENT = 64


@dataclass(kw_only=True, eq=False)
class LoadBuffer:
    """Host memory for one load.

    Attributes:
        memory: for blocks.
        copied: a result of the program that read it last, if any.
    """

    memory: np.ndarray
    copied: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Blocks that have been read.

    Attributes:
        blocks: `[n, L, K, B, ROW]`.
        count: how many of them there are.
        buffer: where they lie, for `LoadBuffers.give_back`.
    """

    blocks: Any
    count: int
    buffer: LoadBuffer | None


class LoadBuffers:
    """Buffers that are used again: memory that the system has just given is slow to write.

    There are as many as loads at a time. One that is not given back is forgotten.

    Args:
        shape, dtype: of a buffer.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._lock = threading.Lock()
        self._free: list[LoadBuffer] = []

    def take(self) -> LoadBuffer:
        """A buffer that nobody reads any more; waits for the device if need be."""
        with self._lock:
            buffer = self._free.pop(0) if self._free else None
        if buffer is None:
            num_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
            memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
            offset = -memory.ctypes.data % _ALIGNMENT
            memory = memory[offset : offset + num_bytes].view(self._dtype)
            return LoadBuffer(memory=memory.reshape(self._shape))
        if buffer.copied is not None:
            buffer.copied.block_until_ready()
        return buffer

    def give_back(self, buffer: LoadBuffer, copied: jax.Array) -> None:
        """Let a buffer be used again, once `copied` is there."""
        buffer.copied = copied
        with self._lock:
            self._free.append(buffer)
