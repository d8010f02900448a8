"""From FLOPs and bytes to seconds: the roofline of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .hardware import Hardware
from .shape import ModelShape
from .work import Count, Work, larger, num_chunks, prefill_work


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """Where some work lies under a machine's roofline.

    Attributes:
        intensity: FLOPs per byte.
        ridge: intensity from which FLOP/s decide on this machine.
        flops_per_second: what the roofline allows at this intensity, with the shares reached.
        bound_by: "compute" or "memory".
    """

    intensity: float
    ridge: float
    flops_per_second: float
    bound_by: str


def work_seconds(work: Work, hardware: Hardware, *, kv_rate: float | None = None) -> Any:
    """Seconds of `work`: matrices and attention one after the other, each the longer of
    computing and of reading, keys and values at `kv_rate` bytes per second if that is another
    than the memory's. A float, or an array where the work is one."""
    memory = hardware.memory_bytes_per_second
    matmul = larger(
        work.matmul_flops / hardware.matmul_flops_per_second, work.weight_bytes / memory
    )
    attention = larger(
        work.attention_flops / hardware.attention_flops_per_second,
        work.kv_bytes / (kv_rate or memory),
    )
    return matmul + attention


def prefill_seconds(
    shape: ModelShape,
    hardware: Hardware,
    start: Count,
    stop: Count,
    *,
    chunk_size: int | None = None,
) -> Any:
    """Seconds to compute the tokens from `start` to `stop`, one sequence alone.

    Reading the parameters and the keys and values up to `stop` is what a hit that leaves few
    tokens comes down to. A float, or an array where the positions are arrays.
    """
    work = prefill_work(shape, start, stop, chunk_size=chunk_size)
    dispatch = hardware.dispatch_seconds * num_chunks(stop - start, chunk_size)
    return work_seconds(work, hardware, kv_rate=hardware.context_bytes_per_second) + dispatch


def roofline(work: Work, hardware: Hardware) -> RooflinePoint:
    """Where `work` as a whole lies under the roofline of `hardware`."""
    memory, compute = hardware.memory_bytes_per_second, hardware.matmul_flops_per_second
    allowed = work.intensity * memory
    return RooflinePoint(
        intensity=float(work.intensity),
        ridge=hardware.ridge,
        flops_per_second=float(min(allowed, compute)),
        bound_by="compute" if allowed >= compute else "memory",
    )
