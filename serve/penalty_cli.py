"""The command line: `octavo penalty`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..paged.cost_model import Hardware, miss_penalty
from ..paged.cost_model.shape import BYTES_OF_DTYPE
from .console import RUN_ERROR, USAGE_ERROR, give_up
from .cost_options import HARDWARE_HELP, MODEL_HELP, THIS, find_costs
from .penalty_plot import draw_plot
from .penalty_table import notes, print_penalty
from .plot_files import PlotUnavailable, check_plot

Rate = Annotated[float | None, typer.Option(metavar="GB/S", help="Instead of the machine's own.")]


def penalty(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    prefix: Annotated[int, typer.Option(help="Tokens that may be cached.", min=1)],
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "h100",
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
    if plot is not None:
        _check_plot(plot)
    if disk_folder is not None and hardware != THIS:
        give_up(f"--disk-folder: only --hardware {THIS} measures a disk", USAGE_ERROR)
    costs = find_costs(
        model,
        hardware,
        num_devices=devices,
        chunk_size=chunk_size,
        dtype=dtype,
        disk_folder=disk_folder,
    )
    rates = {"link": link, "disk": disk, "remote": remote}
    costs = replace(costs, hardware=_with_rates(costs.hardware, rates))
    result = miss_penalty(costs, prefix, new)
    name = Path(model).name
    if as_json:
        figures = {
            "model": {"name": model, **asdict(costs.shape)},
            "hardware": asdict(costs.hardware),
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
            draw_plot(costs, result, plot, title=f"{name} on {devices} × {costs.hardware.name}")
        except OSError as error:
            give_up(f"cannot write {plot}: {error.strerror or error}", RUN_ERROR)


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
