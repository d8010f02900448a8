"""What a machine can do: the peaks of its data sheet, and the shares of them that are reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

TIERS = ("host", "disk", "remote")
"""Where blocks can lie outside of the accelerator, the nearest first."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of each peak that is reached. The defaults are for machines nobody has measured.

    Attributes:
        matmul: of the FLOP/s, in products with parameters, over a whole prefill. Llama 3 reports
            0.38 to 0.43 in training on H100 (arXiv:2407.21783, table 4).
        attention: of the FLOP/s, in attention. FlashAttention-3 reports 0.5 to 0.75 on H100 for
            the kernel alone (arXiv:2407.08608); the default does not count on it.
        memory: of the memory bandwidth. A plain copy reaches about 0.9 on an H100; kernels that
            read weights and blocks reach less.
        context: of the memory bandwidth, where a prefill chunk reads keys and values before it;
            None means `memory`. With few queries kernels may reach less.
        link: of the host link. NVIDIA's article on nvbandwidth shows 55.6 of 64 GB/s.
        disk: of the drive's sequential rate, through a file system.
        remote: of the network's rate.
    """

    matmul: float = 0.45
    attention: float = 0.45
    memory: float = 0.8
    context: float | None = None
    link: float = 0.85
    disk: float = 0.8
    remote: float = 0.8

    def __post_init__(self) -> None:
        for spec in fields(self):
            if spec.name != "context" or self.context is not None:
                check_positive(f"efficiency.{spec.name}", getattr(self, spec.name))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, and the host that it hangs on. Rates are per second.

    Attributes:
        name: what to call it.
        peak_flops: of matrix products in the model's dtype.
        peak_memory_bytes: of the accelerator's own memory.
        memory_bytes: how much of it there is.
        peak_link_bytes: between host memory and the accelerator, one way.
        peak_disk_read_bytes, peak_disk_write_bytes: None if there is no disk to restore from.
        peak_remote_bytes: from a store on another machine to this host; None if there is none.
        efficiency: what share of each peak is reached.
        dispatch_seconds: what every chunk or step takes beside its work; no data sheet tells.
        assumptions: figures that nobody has published or measured, and what stands in for them.
    """

    name: str
    peak_flops: float
    peak_memory_bytes: float
    memory_bytes: float
    peak_link_bytes: float
    peak_disk_read_bytes: float | None = None
    peak_disk_write_bytes: float | None = None
    peak_remote_bytes: float | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    dispatch_seconds: float = 0.0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("peak_flops", "peak_memory_bytes", "memory_bytes", "peak_link_bytes"):
            check_positive(name, getattr(self, name))
        for name in ("peak_disk_read_bytes", "peak_disk_write_bytes", "peak_remote_bytes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if not (math.isfinite(self.dispatch_seconds) and self.dispatch_seconds >= 0):
            raise ValueError(f"dispatch_seconds={self.dispatch_seconds!r} must be a number >= 0")

    @property
    def matmul_flops_per_second(self) -> float:
        return self.peak_flops * self.efficiency.matmul

    @property
    def attention_flops_per_second(self) -> float:
        return self.peak_flops * self.efficiency.attention

    @property
    def memory_bytes_per_second(self) -> float:
        return self.peak_memory_bytes * self.efficiency.memory

    @property
    def context_bytes_per_second(self) -> float:
        share = self.efficiency.context
        return self.memory_bytes_per_second if share is None else self.peak_memory_bytes * share

    @property
    def link_bytes_per_second(self) -> float:
        return self.peak_link_bytes * self.efficiency.link

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which matrix products are bound by FLOP/s, and not by memory."""
        return self.matmul_flops_per_second / self.memory_bytes_per_second

    @property
    def restore_rates(self) -> Mapping[str, float]:
        """Bytes per second from each tier that there is into host memory, or, from host memory
        itself, into the accelerator's."""
        rates: dict[str, float] = {"host": self.link_bytes_per_second}
        if self.peak_disk_read_bytes is not None:
            rates["disk"] = self.peak_disk_read_bytes * self.efficiency.disk
        if self.peak_remote_bytes is not None:
            rates["remote"] = self.peak_remote_bytes * self.efficiency.remote
        return rates

    @property
    def store_rates(self) -> Mapping[str, float]:
        """As `restore_rates`, in the other direction."""
        rates = dict(self.restore_rates)
        rates.pop("disk", None)
        if self.peak_disk_write_bytes is not None:
            rates["disk"] = self.peak_disk_write_bytes * self.efficiency.disk
        return rates


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError that names a value which is no positive number."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a positive number")
