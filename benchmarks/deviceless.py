"""Compile a function for an accelerator that is not here, and read what its compiler says of it.

Import this before JAX: it chooses the platform, and the dumps that the compilers write. A process
serves one chip, because the compilers keep the first one's architecture, and should be a child of
whatever wants the answer: a kernel for the wrong architecture aborts it. No driver is needed, but
the compilers are: run as a program, this prints the packages for the installed JAX.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

# JAX 0.12 asks for 0.0.50 on a device, which models no cycles of decode on 7x.
_LIBTPU = "libtpu==0.0.52.*"
_DUMP = Path(tempfile.mkdtemp(prefix="deviceless-"))
os.environ.update(
    JAX_PLATFORMS="cpu",
    MOSAIC_GPU_DUMP_TO=str(_DUMP),
    MOSAIC_GPU_DUMP_PTXAS="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
)


def profile_cycles() -> None:
    """Have libtpu model the cycles of what is compiled; before JAX makes its first topology.

    Some kernels that compile without this abort the process with it.
    """
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_static_llo_profile_to={_DUMP}"


import jax  # noqa: E402
from jax import export  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
)

from octavo.pallas_kernels import CHIPS, Chip  # noqa: E402

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
ARCHITECTURES = {"a100": "sm_80", "h200": "sm_90a", "b200": "sm_100a"}
DEVICE_KINDS = {"a100": "NVIDIA A100-SXM4-80GB", "h200": "NVIDIA H200", "b200": "NVIDIA B200"}


def chip_named(name: str) -> Chip:
    return next(chip for chip in CHIPS.values() if chip.name == name)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What is known of a compiled function.

    Attributes:
        temp_bytes: of device memory beside arguments and results.
        identity: whether the caches (arguments of rank 4) keep their row-major layout: another
            would be a copy of the cache at every call. Always so on a GPU.
        registers, spill_bytes, shared_bytes: the most of any Pallas kernel in it (GPU).
        cycles: modelled, of its Pallas kernels (TPU, where libtpu models them).
    """

    temp_bytes: int
    identity: bool
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    cycles: int | None = None
    notes: list[str] = field(default_factory=list)


def compile_for(
    chip: str, fn: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = ()
) -> Compiled:
    """Compile `fn(*avals)` for a chip of `TOPOLOGIES` or `ARCHITECTURES`."""
    for path in _DUMP.iterdir():
        path.unlink()
    compiled = (_compile_tpu if chip in TOPOLOGIES else _compile_gpu)(chip, fn, avals, donate)
    memory = compiled.memory_analysis()
    layouts = [f.layout.major_to_minor for f in jax.tree.leaves(compiled.input_formats[0])]
    identity = all(order == tuple(range(4)) for order in layouts if len(order) == 4)
    figures = _tpu_figures() if chip in TOPOLOGIES else _gpu_figures()
    return Compiled(temp_bytes=memory.temp_size_in_bytes, identity=identity, **figures)


def _mesh(device: Any) -> AbstractMesh:
    return AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)


def _placed(avals: Sequence[Any], device: Any) -> Any:
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), avals)


def _compile_tpu(chip: str, fn: Callable[..., Any], avals: Sequence[Any], donate: Any) -> Any:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    device: Any = topology.devices[0]
    abstract = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    with jax.sharding.use_abstract_mesh(_mesh(abstract)):
        return jax.jit(fn, donate_argnums=donate).lower(*_placed(avals, device)).compile()


def _compile_gpu(chip: str, fn: Callable[..., Any], avals: Sequence[Any], donate: Any) -> Any:
    facts = chip_named(chip)
    major, minor = facts.arch
    kind = DEVICE_KINDS[chip]
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    topology = topologies.get_topology_desc(
        chip,
        "cuda",
        topology="1x1x1",
        target_config=f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {facts.local_bytes + 1024}
          shared_memory_per_block_optin: {facts.local_bytes}
          threads_per_core_limit: 2048 core_count: {facts.num_cores} fpus_per_core: 128
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {int(facts.hbm_bytes_per_second)} l2_cache_size: 52428800
          clock_rate_ghz: {facts.clock_hz / 1e9} device_memory_size: 80000000000
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{kind}"
        """,
    )
    # Mosaic reads the capability off the abstract device, and takes any without one for an sm_90.
    device_type = type(
        f"Device_{chip}", (AbstractDevice,), {"compute_capability": f"{major}.{minor}"}
    )
    abstract = device_type(device_kind=kind, num_cores=facts.num_cores, platform="gpu")
    calls = ("mosaic_gpu", "mosaic_gpu_v2", "__gpu$xla.gpu.triton")
    with jax.sharding.use_abstract_mesh(_mesh(abstract)):
        exported = export.export(
            jax.jit(fn, donate_argnums=donate),
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in calls],
        )(*avals)
    placed = _placed(avals, topology.devices[0])
    return jax.jit(exported.call, donate_argnums=donate).lower(*placed).compile()


def _tpu_figures() -> dict[str, Any]:
    cycles, glue = 0, 0
    for path in _DUMP.glob("*_static_llo_profile.textproto"):
        text = path.read_text(errors="replace")
        name = re.search(r'hlo_op_name: "(.*)"', text)
        estimate = re.search(r"estimated_cycles: (\d+)", text)
        if name is None or estimate is None:
            continue
        if re.match("paged_", name[1]):
            cycles += int(estimate[1])
        else:
            glue += int(estimate[1])
    notes = [f"XLA around it: {glue} cycles"] if glue else []
    return {"cycles": cycles or None, "notes": notes}


def _gpu_figures() -> dict[str, Any]:
    registers, spills, shared = [], [], []
    for path in _DUMP.glob("*.ptxas"):
        text = path.read_text()
        registers += [int(n) for n in re.findall(r"Used (\d+) registers", text)]
        spills += [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", text)]
    for path in _DUMP.glob("*.resources.txt"):
        shared += [int(n) for n in re.findall(r"smem\D*(\d+)", path.read_text(), re.IGNORECASE)]
    return {
        "registers": max(registers, default=None),
        "spill_bytes": max(spills, default=None),
        "shared_bytes": max(shared, default=None),
    }


def requirements() -> list[str]:
    """What pip must install, beside octavo, for the installed JAX; nothing before JAX 0.12."""
    version = metadata.version("jax")
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 12):
        return []
    return [_LIBTPU, f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]


def versions(search_path: Sequence[Path]) -> dict[str, str]:
    """Of what compiles, where the compilers may lie in folders of their own."""
    found = {}
    for name in ("jax", "libtpu", "jax-cuda13-plugin"):
        path = [*map(str, search_path), *sys.path]
        found[name] = next(iter(metadata.distributions(name=name, path=path))).version
    return found


if __name__ == "__main__":
    print(" ".join(requirements()))
