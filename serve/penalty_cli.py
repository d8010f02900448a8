"""The command line: `octavo penalty`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import jax
import typer

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
    miss_penalty,
    model_shape,
)
from ..paged.cost_model.shape import BYTES_OF_DTYPE
from .console import RUN_ERROR, USAGE_ERROR, give_up, progress_bar, quiet_interrupt
from .model_shape import shape_of
from .penalty_plot import draw_plot
from .penalty_table import notes, print_penalty
from .plot_files import PlotUnavailable, check_plot

THIS = "this"

Rate = Annotated[float | None, typer.Option(metavar="GB/S", help="Instead of the machine's own.")]


def penalty(
    model: Annotated[
        str,
        typer.Option(help=f"{', '.join([*MODEL_SHAPES, *KNOWN_MODELS])}; a config.json or GGUF."),
    ],
    prefix: Annotated[int, typer.Option(help="Tokens that may be cached.", min=1)],
    hardware: Annotated[
        str,
        typer.Option(help=f"{', '.join(HARDWARE)}; or 'this', which is measured in seconds."),
    ] = "h100",
    new: Annotated[int, typer.Option(help="Tokens after them that are not.", min=1)] = 32,
    devices: Annotated[
        int, typer.Option("--devices", "--tp", help="Devices that share the model.", min=1)
    ] = 1,
    chunk_size: Annotated[
        int, typer.Option(help="Prompt tokens computed in one step.", min=1)
    ] = 512,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of weights and cache: {', '.join(BYTES_OF_DTYPE)}; or the model's."),
    ] = None,
    link: Rate = None,
    disk: Rate = None,
    remote: Rate = None,
    disk_folder: Annotated[
        Path | None,
        typer.Option(
            help="With --hardware this: where to measure the disk; the temporary folder if not.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw seconds over length, and the roofline, here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and no table.")
    ] = False,
) -> None:
    """What a prefix costs to miss, to restore and to hit on a machine, and what to pin."""
    shape = _shape(model)
    if dtype is None and hardware == THIS and jax.default_backend() == "cpu":
        dtype = "float32"  # what the engine computes in on a CPU
    try:
        shape = shape if dtype is None else shape.with_dtype(dtype)
    except ValueError as error:
        give_up(f"--dtype: {error}", USAGE_ERROR)
    if plot is not None:
        _check_plot(plot)
    with quiet_interrupt():
        machine = _hardware(hardware, shape, chunk_size, disk_folder)
    machine = _with_rates(machine, {"link": link, "disk": disk, "remote": remote})
    try:
        costs = CostModel(shape, machine, devices, chunk_size)
    except ValueError as error:
        give_up(f"--devices: {error}", USAGE_ERROR)
    result = miss_penalty(costs, prefix, new)
    name = Path(model).name
    if as_json:
        figures = {
            "model": {"name": model, **asdict(shape)},
            "hardware": asdict(machine),
            "num_devices": devices,
            "chunk_size": chunk_size,
            **asdict(result),
            "notes": notes(costs, result),
        }
        typer.echo(json.dumps(figures, indent=1))
    else:
        print_penalty(costs, result, model=name)
    if plot is not None:
        try:
            draw_plot(costs, result, plot, title=f"{name} on {devices} × {machine.name}")
        except OSError as error:
            give_up(f"cannot write {plot}: {error.strerror or error}", RUN_ERROR)


def _shape(name: str) -> ModelShape:
    try:
        if name in KNOWN_MODELS or name.endswith(".gguf"):
            source = GgufSource(find_model(name)[1])
            return shape_of(LlamaConfig.from_gguf(source.metadata, set(source.tensors)))
        return model_shape(name)
    except (OSError, ValueError) as error:
        give_up(f"--model: {error}", USAGE_ERROR)


def _hardware(name: str, shape: ModelShape, chunk_size: int, disk_folder: Path | None) -> Hardware:
    if name in HARDWARE and disk_folder is not None:
        give_up(f"--disk-folder: only --hardware {THIS} measures a disk", USAGE_ERROR)
    if name in HARDWARE:
        return HARDWARE[name]
    if name != THIS:
        give_up(f"--hardware: {name!r} is none of {THIS}, {', '.join(HARDWARE)}", USAGE_ERROR)
    folder = disk_folder or Path(tempfile.gettempdir())
    try:
        with progress_bar() as progress:
            progress(0, 0, "measuring this machine")
            return calibrate(shape, chunk_size=chunk_size, disk_folder=folder)
    except OSError as error:
        give_up(f"cannot measure the disk in {folder}: {error.strerror or error}", RUN_ERROR)


def _with_rates(machine: Hardware, rates: dict[str, float | None]) -> Hardware:
    """The machine with the rates given, in GB/s and as reached, in place of its own."""
    for name, rate in rates.items():
        if rate is None:
            continue
        value = rate * 1e9
        fields = {"disk": ("peak_disk_read_bytes", "peak_disk_write_bytes")}
        try:
            machine = replace(
                machine,
                **dict.fromkeys(fields.get(name, (f"peak_{name}_bytes",)), value),
                efficiency=replace(machine.efficiency, **{name: 1.0}),
                assumptions=tuple(
                    text for text in machine.assumptions if not text.startswith(f"{name}:")
                ),
            )
        except ValueError as error:
            give_up(f"--{name}: {rate}: {error}", USAGE_ERROR)
    return machine


def _check_plot(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a directory" if path.is_dir() else f"there is no {path.parent}"
        give_up(f"--plot: cannot write {path}: {reason}", USAGE_ERROR)
    try:
        check_plot(path)
    except PlotUnavailable as error:
        give_up(f"--plot: {error}", USAGE_ERROR)
