"""Where blocks lie between a device and the tiers below it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ..paged.tiers import aligned_empty


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Host memory from and to which a device copies by itself, while it computes.

    Attributes:
        host: page-locked memory, JAX's memory kind `pinned_host`; None where there is none, or no
            need of it.
        device: the device's own.
        is_host: whether the device's memory is the host's.
    """

    host: Sharding | None
    device: Sharding
    is_host: bool

    @classmethod
    def of(cls, device: Any) -> Staging:
        """That of a device, as far as its platform has any."""
        kinds = [memory.kind for memory in device.addressable_memories()]
        host = None
        if device.platform != "cpu" and "pinned_host" in kinds:
            host = SingleDeviceSharding(device, memory_kind="pinned_host")
        is_host = device.platform == "cpu"
        return cls(host=host, device=SingleDeviceSharding(device), is_host=is_host)

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
    """Blocks that have been read, or can be copied from where they are.

    Attributes:
        count: how many of them there are.
        blocks: `[n, L, K, B, ROW]`, if they have been read.
        buffer: where those lie, for `LoadBuffers.give_back`.
        keys, tokens: of blocks that have not been read, for `HostTier.lend`.
    """

    count: int
    blocks: Any = None
    buffer: LoadBuffer | None = None
    keys: Sequence[bytes] = ()
    tokens: np.ndarray | None = None


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
            return LoadBuffer(memory=aligned_empty(self._shape, self._dtype))
        if buffer.copied is not None:
            buffer.copied.block_until_ready()
        return buffer

    def give_back(self, buffer: LoadBuffer, copied: jax.Array) -> None:
        """Let a buffer be used again, once `copied` is there."""
        buffer.copied = copied
        with self._lock:
            self._free.append(buffer)
