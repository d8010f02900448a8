"""The chip that a program is traced for, and what the kernels need to know of it.

Kernels choose tile sizes, and between instruction sets, by the chip. It is the device of the
abstract mesh in use, if that names one (so that a program can be compiled for a chip that is not
here), else JAX's default device, else the one that `interpret_kernels` pretends to have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator as its data sheet gives it; a TPU's figures are those of one TensorCore.

    Attributes:
        platform: "gpu" or "tpu".
        name: short name, such as "h200" or "v6e".
        arch: compute capability of a GPU as (major, minor); generation of a TPU as (n, 0).
        num_cores: SMs of a GPU, 1 for a TPU.
        local_bytes: shared memory one GPU block can have, or VMEM.
        hbm_bytes_per_second: peak memory bandwidth.
        bf16_flops_per_second: peak dense bfloat16 products.
        clock_hz: of the compute units.
        array_size: of a TPU's matrix units, which are square: 256 from v6e on, 128 before (Google
            Cloud's "TPU architecture"; libtpu's model of a product agrees for 7x). 0 for a GPU.
    """

    platform: str
    name: str
    arch: tuple[int, int]
    num_cores: int
    local_bytes: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    clock_hz: float
    array_size: int = 0


def _gpu(
    name: str, arch: tuple[int, int], sms: int, smem: int, hbm: float, flops: float, ghz: float
) -> Chip:
    return Chip(
        platform="gpu",
        name=name,
        arch=arch,
        num_cores=sms,
        local_bytes=smem,
        hbm_bytes_per_second=hbm,
        bf16_flops_per_second=flops,
        clock_hz=ghz * 1e9,
    )


def _tpu(name: str, generation: int, vmem_mib: int, hbm: float, flops: float, ghz: float) -> Chip:
    return Chip(
        platform="tpu",
        name=name,
        arch=(generation, 0),
        num_cores=1,
        local_bytes=vmem_mib << 20,
        hbm_bytes_per_second=hbm,
        bf16_flops_per_second=flops,
        clock_hz=ghz * 1e9,
        array_size=256 if generation >= 6 else 128,
    )


# By words of JAX's device_kind; the first that occur in it count.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "H200": _gpu("h200", (9, 0), 132, 232448, 4.8e12, 989e12, 1.98),
        "H100": _gpu("h100", (9, 0), 132, 232448, 3.35e12, 989e12, 1.98),
        "B200": _gpu("b200", (10, 0), 148, 232448, 8.0e12, 2250e12, 1.85),
        "A100": _gpu("a100", (8, 0), 108, 166912, 2.0e12, 312e12, 1.41),
        "L4": _gpu("l4", (8, 9), 58, 101376, 0.3e12, 121e12, 2.04),
        "T4": _gpu("t4", (7, 5), 40, 65536, 0.32e12, 65e12, 1.59),
        "TPU v4": _tpu("v4", 4, 16, 0.615e12, 137.5e12, 1.05),
        "TPU v5 lite": _tpu("v5e", 5, 128, 0.82e12, 197e12, 1.5),
        "TPU v5": _tpu("v5p", 5, 64, 1.23e12, 229.5e12, 1.75),
        "TPU v6 lite": _tpu("v6e", 6, 128, 1.64e12, 918e12, 1.75),
        "TPU7x": _tpu("7x", 7, 64, 3.69e12, 1153e12, 2.2),
    }
)


@dataclass(frozen=True, kw_only=True)
class Interpretation:
    """How kernels run without their device.

    Attributes:
        chip: the chip that the kernels believe to be on.
        mode: "generic" runs a TPU kernel's arithmetic only and is fast; "simulate" models
            memories, copies and semaphores; "races" also fails on unsynchronised accesses.
    """

    chip: Chip
    mode: str = "simulate"

    def __post_init__(self) -> None:
        modes = ("generic", "simulate", "races") if self.chip.platform == "tpu" else _GPU_MODES
        if self.mode not in modes:
            raise ValueError(
                f"mode={self.mode!r} for a {self.chip.platform} must be one of {modes}"
            )


_GPU_MODES = ("simulate", "races")

interpret_kernels = jax.make_user_context(default_value=None)
"""`with interpret_kernels(Interpretation(chip=CHIPS["H200"])):` runs Pallas kernels on any CPU.

Simulated programs wait for one another in XLA's pool of threads. On few cores set `NPROC=16` in the
environment before the process starts, or they can wait for ever.
"""


class UnsupportedChip(NotImplementedError):
    """No call of this op can be served on this chip by this implementation."""


def current_platform() -> str:
    """The platform that is being traced for: "cpu", "gpu" or "tpu"."""
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def current_chip() -> Chip:
    """The chip that is being traced for.

    Raises:
        UnsupportedChip: it is a CPU, or a chip of a kind that is not in `CHIPS` and that does
            not say enough of itself.
    """
    if interpret_kernels.value is not None:
        return interpret_kernels.value.chip
    device: Any = jax.sharding.get_abstract_mesh()
    device = getattr(device, "abstract_device", None) or jax.devices()[0]
    if device.platform not in ("gpu", "cuda", "tpu"):
        raise UnsupportedChip(f"{device.platform} runs no Pallas kernel but in interpret mode")
    for part, chip in CHIPS.items():
        if re.search(rf"\b{part}\b", device.device_kind):
            return chip
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        raise UnsupportedChip(f"device kind {device.device_kind!r} is unknown: add it to CHIPS")
    major, minor = (int(part) for part in str(capability).split("."))
    return _unknown_gpu(device.device_kind, (major, minor), getattr(device, "num_cores", 0))


def require_chip(platform: str) -> Chip:
    """The chip that is being traced for, which must be of this platform.

    Raises:
        UnsupportedChip: it is of another, unknown, or a GPU that is too old.
    """
    chip = current_chip()
    if chip.platform != platform:
        raise UnsupportedChip(f"this kernel is for a {platform.upper()}, not for {chip.name}")
    if platform == "gpu" and chip.arch < (8, 0):
        raise UnsupportedChip(f"{chip.name} is older than sm_80, which the GPU kernels need")
    return chip


def _unknown_gpu(kind: str, arch: tuple[int, int], num_cores: int | None) -> Chip:
    """A GPU that is not in the table, with the figures of the smallest of its generation."""
    relatives = [chip for chip in CHIPS.values() if chip.platform == "gpu"]
    older = [chip for chip in relatives if chip.arch <= arch] or relatives
    closest = max(older, key=lambda chip: chip.arch)
    # Consumer chips of a generation have less shared memory than its data-centre ones.
    smem = closest.local_bytes if arch[1] == 0 and arch < (12, 0) else 101376
    return Chip(
        platform="gpu",
        name=kind.lower().replace(" ", "-"),
        arch=arch,
        num_cores=num_cores or closest.num_cores,
        local_bytes=smem,
        hbm_bytes_per_second=closest.hbm_bytes_per_second,
        bf16_flops_per_second=closest.bf16_flops_per_second,
        clock_hz=closest.clock_hz,
    )


def interpret_argument() -> Any:
    """What a Pallas call's `interpret` is: False on a device, else as `interpret_kernels` says."""
    wanted = interpret_kernels.value
    if wanted is None:
        return False
    if wanted.mode == "generic":
        return True
    races = wanted.mode == "races"
    if wanted.chip.platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=races)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise NotImplementedError(
            f"JAX {jax.__version__} cannot interpret GPU kernels: 0.12 or later does"
        )
    return params(detect_races=races)
