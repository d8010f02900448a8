"""What several commands take: whose costs to predict, a model's by name and a machine's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax

from ..models.config import LlamaConfig
from ..models.gguf_io import GgufSource
from ..models.loading import KNOWN_MODELS, find_model
from ..paged.cost_model import (
    HARDWARE,
    MODEL_SHAPES,
    CostModel,
    Hardware,
    ModelShape,
    calibrate,
    model_shape,
)
from .console import RUN_ERROR, USAGE_ERROR, give_up, progress_bar, quiet_interrupt
from .model_shape import shape_of

THIS = "this"
MODEL_HELP = f"{', '.join([*MODEL_SHAPES, *KNOWN_MODELS])}; a config.json or GGUF."
HARDWARE_HELP = f"{', '.join(HARDWARE)}; or 'this', which is measured in seconds."


def find_costs(
    model: str,
    hardware: str,
    *,
    num_devices: int,
    chunk_size: int,
    dtype: str | None = None,
    disk_folder: Path | None = None,
) -> CostModel:
    """What computing and restoring costs, by the values of options; a mistake ends the command.

    Args:
        model: `--model`.
        hardware: `--hardware`.
        num_devices: `--devices`.
        chunk_size: prompt tokens computed in one step.
        dtype: `--dtype`, None for the model's own.
        disk_folder: where to measure a disk, None for the temporary folder.
    """
    shape = _shape(model)
    if dtype is None and hardware == THIS and jax.default_backend() == "cpu":
        dtype = "float32"  # what the engine computes in on a CPU
    try:
        shape = shape if dtype is None else shape.with_dtype(dtype)
    except ValueError as error:
        give_up(f"--dtype: {error}", USAGE_ERROR)
    if hardware not in (THIS, *HARDWARE):
        give_up(f"--hardware: {hardware!r} is none of {THIS}, {', '.join(HARDWARE)}", USAGE_ERROR)
    try:
        shape.on_devices(num_devices)
    except ValueError as error:
        give_up(f"--devices: {error}", USAGE_ERROR)
    with quiet_interrupt():
        machine = _measured(shape, chunk_size, disk_folder) if hardware == THIS else None
    return CostModel(shape, machine or HARDWARE[hardware], num_devices, chunk_size)


def _shape(name: str) -> ModelShape:
    try:
        if name in KNOWN_MODELS or name.endswith(".gguf"):
            source = GgufSource(find_model(name)[1])
            return shape_of(LlamaConfig.from_gguf(source.metadata, set(source.tensors)))
        return model_shape(name)
    except (OSError, ValueError) as error:
        give_up(f"--model: {error}", USAGE_ERROR)


def _measured(shape: ModelShape, chunk_size: int, disk_folder: Path | None) -> Hardware:
    folder = disk_folder or Path(tempfile.gettempdir())
    try:
        with progress_bar() as progress:
            progress(0, 0, "measuring this machine")
            return calibrate(shape, chunk_size=chunk_size, disk_folder=folder)
    except OSError as error:
        give_up(f"cannot measure the disk in {folder}: {error.strerror or error}", RUN_ERROR)
