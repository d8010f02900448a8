"""Where blocks lie between a device and the tiers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
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
