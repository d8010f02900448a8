"""Which implementation serves a call: by platform, by chip, and by name."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from octavo.pallas_kernels import CHIPS, Chip, Interpretation, interpret_kernels, paged_attention
from octavo.pallas_kernels import dispatch as dispatch_module
from octavo.pallas_kernels.chips import UnsupportedChip, current_chip, require_chip
from octavo.pallas_kernels.dispatch import Op


def on_chip(kind: str, platform: str, compute_capability: str | None = None):
    """Tracing for a chip that is not here, as ahead-of-time compilation does."""
    attributes = {} if compute_capability is None else {"compute_capability": compute_capability}
    device = type("Device", (AbstractDevice,), attributes)(
        device_kind=kind, num_cores=7, platform=platform
    )
    mesh = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def cannot(x: int) -> int:
    raise NotImplementedError("too old")


def test_a_named_implementation_never_falls_back() -> None:
    op = Op(name="op", implementations={"fast": cannot, "xla": lambda x: x + 1})
    assert op(None, 1) == op("xla", 1) == 2
    with pytest.raises(NotImplementedError, match="too old"):
        op("fast", 1)
    with pytest.raises(ValueError, match="expected one of fast, xla"):
        op("triton", 1)


def test_the_next_of_the_order_serves_what_the_first_cannot() -> None:
    order = {"cpu": ("fast", "xla")}
    op = Op(name="op", implementations={"fast": cannot, "xla": lambda x: x + 1}, order=order)
    assert op(None, 1) == 2
    alone = Op(name="op", implementations={"fast": cannot}, order={"cpu": ("fast",)})
    with pytest.raises(NotImplementedError, match="nothing serves this call on cpu: fast: too old"):
        alone(None, 1)


@pytest.mark.parametrize(
    ("kind", "platform", "capability", "name", "arch"),
    [
        ("NVIDIA H200", "gpu", "9.0", "h200", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", "gpu", "8.0", "a100", (8, 0)),
        ("Tesla T4", "gpu", "7.5", "t4", (7, 5)),
        ("NVIDIA L40S", "gpu", "8.9", "nvidia-l40s", (8, 9)),
        ("NVIDIA GeForce RTX 5090", "gpu", "12.0", "nvidia-geforce-rtx-5090", (12, 0)),
        ("TPU v5 lite", "tpu", None, "v5e", (5, 0)),
        ("TPU v5", "tpu", None, "v5p", (5, 0)),
        ("TPU7x", "tpu", None, "7x", (7, 0)),
    ],
)
def test_the_chip_is_read_off_the_device_that_is_traced_for(
    kind: str, platform: str, capability: str | None, name: str, arch: tuple[int, int]
) -> None:
    with on_chip(kind, platform, capability):
        chip = current_chip()
    assert (chip.name, chip.arch, chip.platform) == (name, arch, platform)
    if capability is not None and name not in {c.name for c in CHIPS.values()}:
        assert chip.num_cores == 7


def test_a_cpu_is_no_chip_unless_it_interprets_one() -> None:
    with pytest.raises(UnsupportedChip, match="interpret mode"):
        current_chip()
    with interpret_kernels(Interpretation(chip=CHIPS["A100"])):
        assert require_chip("gpu").name == "a100"
        with pytest.raises(UnsupportedChip, match="for a TPU, not for a100"):
            require_chip("tpu")
    with pytest.raises(ValueError, match="mode='generic' for a gpu"):
        Interpretation(chip=CHIPS["A100"], mode="generic")
    with on_chip("TPU v99", "tpu"), pytest.raises(UnsupportedChip, match="add it to CHIPS"):
        current_chip()


def test_an_old_gpu_is_served_by_xla_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    dispatch_module._warn_once.cache_clear()
    attend: Callable = paged_attention
    args = (
        jnp.ones((1, 2, 64)),
        jnp.zeros((3, 1, 16, 128)),
        jnp.array([[1]], jnp.int32),
        jnp.array([5], jnp.int32),
        jnp.array([0, 1], jnp.int32),
    )
    with caplog.at_level(logging.INFO, "octavo"), on_chip("Tesla T4", "gpu", "7.5"):
        programs = [str(jax.make_jaxpr(attend)(*args)) for _ in range(2)]
        with pytest.raises(UnsupportedChip, match="older than sm_80"):
            paged_attention(*args, implementation="mosaic_gpu")
    assert not any("pallas" in program for program in programs)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "t4 is older than sm_80, which the GPU kernels need: plain XLA serves instead"
    ]
    np.testing.assert_array_equal(attend(*args)[0], 0)


def test_unknown_gpus_borrow_the_figures_of_their_generation() -> None:
    with on_chip("NVIDIA L40S", "gpu", "8.9"):
        chip = current_chip()
    assert isinstance(chip, Chip) and chip.local_bytes == CHIPS["L4"].local_bytes
