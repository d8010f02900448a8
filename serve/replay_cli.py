"""The command line: `octavo replay`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..paged.replay import (
    Trace,
    TraceError,
    default_capacities,
    make_report,
    make_tier_report,
    read_trace,
    replay_policies,
)
from ..paged.replay.program import POLICIES
from ..paged.replay.tier_report import HOST_FACTOR
from .console import RUN_ERROR, USAGE_ERROR, give_up, progress_bar, quiet_interrupt
from .cost_options import HARDWARE_HELP, MODEL_HELP, find_costs
from .plot_files import PlotUnavailable, check_plot
from .replay_plot import draw_plot
from .replay_table import print_replay

CHUNK_SIZE = 512
"""Prompt tokens computed in one step, as the engine does by default."""


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="A request log: JSON lines in Mooncake's form, or with tokens."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Eviction policy ({', '.join(POLICIES)}), repeatable; default: all."),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(help="Blocks in the cache, repeatable; default: a range.", min=1),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens per block, for a log with tokens.", min=1)
    ] = 16,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "llama-3.1-8b",
    hardware: Annotated[str, typer.Option(help=HARDWARE_HELP)] = "h100",
    devices: Annotated[
        int, typer.Option("--devices", "--tp", help="Devices that share the model.", min=1)
    ] = 1,
    host_blocks: Annotated[
        int | None,
        typer.Option(
            help=f"Blocks in host memory, 0 for none; default: {HOST_FACTOR} times the capacity.",
            min=0,
        ),
    ] = None,
    disk_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks on disk, 0 for none; default: all there are.", min=0),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures over capacity into this file.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Replay TRACE through the block manager: every policy with every capacity, at once."""
    policies = list(dict.fromkeys(policy or POLICIES))
    if unknown := [name for name in policies if name not in POLICIES]:
        give_up(f"--policy: {unknown[0]!r} is none of {', '.join(POLICIES)}", USAGE_ERROR)
    _check_outputs(plot, json_file)
    log = _read(trace, block_size)
    costs = find_costs(model, hardware, num_devices=devices, chunk_size=CHUNK_SIZE)
    capacities = sorted(set(capacity or default_capacities(log)))
    with quiet_interrupt(), progress_bar() as progress:
        hits = replay_policies(log, policies, capacities, shape=costs.shape, progress=progress)
        progress(0, 0, "optimum")
        results = make_report(log, hits, costs)
        progress(0, 0, "lower tiers")
        below = make_tier_report(log, hits, costs, host_blocks=host_blocks, disk_blocks=disk_blocks)
    name = Path(model).name
    title = f"{trace.name}, {name} on {devices} × {costs.hardware.name}"
    print_replay(log, results, below, title=title)
    about = {
        "trace": trace.name,
        "num_requests": log.num_requests,
        "num_blocks": int(log.num_blocks.sum()),
        "num_distinct_blocks": log.num_symbols,
        "tokens_per_block": log.tokens_per_block,
        "model": {"name": model, **asdict(costs.shape)},
        "hardware": asdict(costs.hardware),
        "num_devices": devices,
        "chunk_size": CHUNK_SIZE,
    }
    try:
        if json_file is not None:
            figures = {
                **about,
                "results": [asdict(result) for result in results],
                "tiers": [asdict(result) for result in below],
            }
            json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            draw_plot(results, plot, title=f"{trace.name}, {name}")
    except OSError as error:
        give_up(f"cannot write {error.filename}: {error.strerror or error}", RUN_ERROR)


def _check_outputs(plot: Path | None, json_file: Path | None) -> None:
    """A replay takes minutes: find out before it whether there is a place for its results."""
    for option, path in (("--plot", plot), ("--json", json_file)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            reason = "it is a directory" if path.is_dir() else f"there is no {path.parent}"
            give_up(f"{option}: cannot write {path}: {reason}", USAGE_ERROR)
    if plot is not None:
        try:
            check_plot(plot)
        except PlotUnavailable as error:
            give_up(f"--plot: {error}", USAGE_ERROR)


def _read(path: Path, block_size: int) -> Trace:
    try:
        return read_trace(path, block_size=block_size)
    except TraceError as error:
        give_up(str(error), RUN_ERROR)
    except OSError as error:
        give_up(f"cannot read {path}: {error.strerror or error}", RUN_ERROR)
