"""The command line: `octavo replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..paged.cost_model import HARDWARE, MODEL_SHAPES, Hardware, ModelShape, model_shape
from ..paged.replay import (
    ReplayResult,
    Trace,
    TraceError,
    default_capacities,
    make_report,
    read_trace,
    replay_policies,
)
from ..paged.replay.program import POLICIES
from .console import RUN_ERROR, USAGE_ERROR, err, give_up, progress_bar, quiet_interrupt
from .plot_files import PlotUnavailable, check_plot
from .replay_plot import draw_plot

_TABLE_WIDTH = 110  # where stdout is no terminal and so has none


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
    model: Annotated[
        str,
        typer.Option(
            "--model-shape",
            help=f"Whose FLOPs to count: {', '.join(MODEL_SHAPES)}, or a config.json.",
        ),
    ] = "llama-3.1-8b",
    machine: Annotated[
        str, typer.Option("--hardware", help=f"Whose seconds to predict: {', '.join(HARDWARE)}.")
    ] = "h100",
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
    shape, hardware = _shape(model), _hardware(machine)
    _check_outputs(plot, json_file)
    log = _read(trace, block_size)
    capacities = sorted(set(capacity or default_capacities(log)))
    with quiet_interrupt(), progress_bar() as progress:
        hits = replay_policies(log, policies, capacities, shape=shape, progress=progress)
        progress(0, 0, "optimum")
        results = make_report(log, hits, shape=shape, hardware=hardware)
    _print_table(log, results, title=f"{trace.name}, {model} on {machine}")
    about = {
        "trace": trace.name,
        "num_requests": log.num_requests,
        "num_blocks": int(log.num_blocks.sum()),
        "num_distinct_blocks": log.num_symbols,
        "tokens_per_block": log.tokens_per_block,
        "model_shape": {"name": model, **asdict(shape)},
        "hardware": {"name": machine, **asdict(hardware)},
    }
    try:
        if json_file is not None:
            figures = {**about, "results": [asdict(result) for result in results]}
            json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            draw_plot(results, plot, title=f"{trace.name}, {model}")
    except OSError as error:
        give_up(f"cannot write {error.filename}: {error.strerror or error}", RUN_ERROR)


def _shape(name: str) -> ModelShape:
    try:
        return model_shape(name)
    except ValueError as error:
        give_up(f"--model-shape: {error}", USAGE_ERROR)


def _hardware(name: str) -> Hardware:
    if name not in HARDWARE:
        give_up(f"--hardware: {name!r} is none of {', '.join(HARDWARE)}", USAGE_ERROR)
    return HARDWARE[name]


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


def _print_table(trace: Trace, results: Sequence[ReplayResult], *, title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("capacity", "policy"):
        table.add_column(name, justify="right" if name == "capacity" else "left", no_wrap=True)
    for name in ("hit ratio", "recomputed tokens", "PFLOP", "prefill s", "saved FLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of the gap", justify="right", no_wrap=True)
    previous = results[0].capacity
    for result in results:
        if result.capacity != previous:
            table.add_section()
        previous = result.capacity
        table.add_row(
            "∞" if result.capacity is None else f"{result.capacity:,}",
            result.policy,
            f"{result.hit_ratio:.3f}",
            f"{result.recomputed_tokens:,}",
            _number(result.recomputed_flops / 1e15),
            _number(result.prefill_seconds),
            f"{result.saved_flops_share:.3f}",
            "–" if result.gap_closed is None else f"{result.gap_closed:.2f}",
        )
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=max(out.width, _TABLE_WIDTH))
    out.print(table)
    out.print(
        f"{trace.num_requests:,} requests, {len(trace.symbols):,} blocks of "
        f"{trace.tokens_per_block} tokens looked up, {trace.num_symbols:,} distinct; gap: saved "
        "FLOPs from lru (0) to optimum (1)",
        soft_wrap=True,
    )
    if refused := {r.capacity: r.num_refused for r in results if r.num_refused}:
        sizes = ", ".join(f"{count:,} at {size:,}" for size, count in refused.items() if size)
        err.print(f"requests larger than the cache, computed in full: {sizes}", soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
