"""The picture of a miss penalty: seconds over the prefix's length, and the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..paged.cost_model import CostModel, MissPenalty, miss_penalty
from .plot_files import check_plot

_NUM_POINTS = 25
_SHORTEST = 128
_COLOURS = {"miss": "tab:red", "hit": "tab:green", "decode": "tab:gray", "host": "tab:blue"}
_COLOURS |= {"disk": "tab:orange", "remote": "tab:purple"}


def draw_plot(costs: CostModel, result: MissPenalty, path: Path, *, title: str) -> None:
    """Draw `result` and what shorter prefixes cost into a file; its ending says in what format.

    Raises:
        PlotUnavailable: see `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(path)
    # A figure without pyplot: no window system, no state of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(title)
    _draw_seconds(figure.add_subplot(1, 2, 1), costs, result)
    _draw_roofline(figure.add_subplot(1, 2, 2), costs, result)
    figure.savefig(path)


def _draw_seconds(axes: Any, costs: CostModel, result: MissPenalty) -> None:
    longest = max(result.prefix_len, 2 * _SHORTEST)
    lengths = np.unique(np.geomspace(_SHORTEST, longest, _NUM_POINTS).astype(int)).tolist()
    penalties = [miss_penalty(costs, length, result.num_new).by_name for length in lengths]
    for name in ("miss", *reversed(costs.tiers), "hit"):
        restored = name in costs.tiers
        axes.plot(
            lengths,
            [penalty[name].seconds for penalty in penalties],
            label=f"restore from {name}" if restored else name,
            linestyle="--" if restored else "-",
            color=_COLOURS[name],
        )
    for tier in result.break_even:
        if tier.length is not None and _SHORTEST <= tier.length <= longest:
            at = tier.length
            axes.plot(at, costs.seconds_to_first_token(0, at + result.num_new), "ko", markersize=5)
            axes.annotate(
                f"{tier.tier}: {at:,}",
                (at, costs.seconds_to_first_token(0, at + result.num_new)),
                xytext=(8, -8),
                textcoords="offset points",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    ticks = [length for length in (1 << n for n in range(7, 30, 2)) if length <= longest]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of prefix",
        ylabel=f"seconds to first token ({result.num_new:,} new)",
    )
    axes.set_xticks(ticks, [f"{tick // 1024}K" if tick >= 1024 else str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_roofline(axes: Any, costs: CostModel, result: MissPenalty) -> None:
    """What the machine allows, and where miss, hit and decoding lie by their predicted seconds."""
    machine = costs.machine
    names = ("decode", "hit", "miss")
    points = [result.by_name[name] for name in names]
    low = min([point.intensity for point in points] + [machine.ridge]) / 4
    high = max([point.intensity for point in points] + [machine.ridge]) * 4
    x = np.geomspace(low, high, 200)
    for label, compute, memory, style in (
        ("data sheet", machine.peak_flops, machine.peak_memory_bytes, ":"),
        ("reached", machine.matmul_flops_per_second, machine.memory_bytes_per_second, "-"),
    ):
        axes.plot(x, np.minimum(x * memory, compute) / 1e12, f"k{style}", label=label, linewidth=1)
    for name, point in zip(names, points, strict=True):
        reached = point.flops / point.seconds / 1e12
        axes.plot(point.intensity, reached, "o", color=_COLOURS[name])
        axes.annotate(
            name,
            (point.intensity, reached),
            xytext=(8, -12),
            textcoords="offset points",
            color=_COLOURS[name],
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of device memory", ylabel="TFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
