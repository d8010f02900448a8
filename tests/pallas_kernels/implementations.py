"""The implementations that a kernel's tests run, and which cases each can afford."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping

import jax
import pytest
from attention_cases import Case

from octavo.pallas_kernels import (
    CHIPS,
    Interpretation,
    Tuning,
    interpret_kernels,
    kernel_tuning,
)

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """An implementation by name, and the chip it is interpreted as where it is a Pallas kernel."""

    name: str
    chip: str | None = None
    mode: str = "generic"
    knobs: str = ""

    def __str__(self) -> str:
        return self.name if self.chip is None else f"{self.name}-{self.chip}-{self.mode}"

    @property
    def platform(self) -> str:
        return "cpu" if self.chip is None else CHIPS[self.chip].platform

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.chip is not None:
                interpretation = Interpretation(chip=CHIPS[self.chip], mode=self.mode)
                stack.enter_context(interpret_kernels(interpretation))
            if self.knobs:
                stack.enter_context(kernel_tuning(Tuning.from_json(self.knobs)))
            yield

    def adapt(self, case: Case) -> Case:
        """The case in a dtype that the implementation serves."""
        if self.platform == "gpu" and case.dtype == "float32":
            return dataclasses.replace(case, dtype="bfloat16")
        return case


def small_steps(chip: str) -> str:
    """Knobs by which short contexts take many steps, and a kernel compiles in seconds."""
    entry = {"chip": CHIPS[chip].name, "when": {}}
    decode = {"chunk_tokens": 64, "tail_tokens": 32}
    tiles = {"tile_queries": 32, "chunk_tokens": 64, "lanes": 128}
    return json.dumps(
        [
            entry | {"kernel": "mosaic_tpu.decode", "knobs": decode},
            entry | {"kernel": "mosaic_tpu.tiles", "knobs": tiles},
        ]
    )


REFERENCE = Implementation(name="reference")
XLA = Implementation(name="xla")
NUMBA = Implementation(name="numba")
_V6E = "TPU v6 lite"
V6E = Implementation(name="mosaic_tpu", chip=_V6E, knobs=small_steps(_V6E))
V6E_RACES = Implementation(name="mosaic_tpu", chip=_V6E, mode="races", knobs=small_steps(_V6E))
V4 = Implementation(name="mosaic_tpu", chip="TPU v4")
H200 = Implementation(name="mosaic_gpu", chip="H200", mode="simulate")
H200_RACES = Implementation(name="mosaic_gpu", chip="H200", mode="races")
A100 = Implementation(name="mosaic_gpu", chip="A100", mode="simulate")
A100_RACES = Implementation(name="mosaic_gpu", chip="A100", mode="races")
B200 = Implementation(name="mosaic_gpu", chip="B200", mode="simulate")

# The simulators run a thread for every program of a grid, on XLA's pool of threads, and wait in
# them: with a pool of two, as on two cores, they can wait for ever. XLA takes the pool's size from
# this variable, when the process starts.
NPROC = "16"
CAN_SIMULATE = os.environ.get("NPROC") == NPROC


def params(
    quick: Mapping[Implementation, Iterable[str]], cases: Iterable[str], *, skip: Iterable[str] = ()
) -> list:
    """(implementation, case) parameters: of every case, but those that are not quick need
    --kernels, and the simulators leave those to skip out."""
    found = []
    for implementation, fast in quick.items():
        for case in cases:
            if implementation.mode == "races" and case in skip:
                continue
            marks = [] if case in fast else [pytest.mark.kernels]
            name = f"{implementation}-{case}"
            found.append(
                pytest.param(implementation, case, id=name, marks=marks_of(implementation, *marks))
            )
    return found


def marks_of(implementation: Implementation, *more: pytest.MarkDecorator) -> list:
    """The marks that every test of an implementation needs."""
    marks = list(more)
    if implementation.mode != "generic":
        marks.append(pytest.mark.simulated)
    if implementation.platform == "gpu" and JAX_VERSION < (0, 12):
        marks.append(pytest.mark.skip(reason="JAX 0.12 interprets GPU kernels"))
    return marks
