"""The picture of a replay: hit ratio and saved FLOPs over capacity. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..paged.replay import ReplayResult
from ..paged.replay.report import OPTIMUM, UNLIMITED
from .plot_files import check_plot


def draw_plot(results: Sequence[ReplayResult], path: Path, *, title: str) -> None:
    """Draw `results` into a file; its ending says in what format.

    Raises:
        PlotUnavailable: see `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(path)
    # A figure without pyplot: no window system, no state of the process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    for axes, field, label in (
        (figure.add_subplot(1, 2, 1), "hit_ratio", "blocks found / looked up"),
        (figure.add_subplot(1, 2, 2), "saved_flops_share", "prefill FLOPs saved / in all"),
    ):
        for policy in dict.fromkeys(result.policy for result in results):
            points = [result for result in results if result.policy == policy]
            values = [getattr(result, field) for result in points]
            if policy == UNLIMITED:
                axes.axhline(values[0], color="0.6", linestyle=":", label=policy)
                continue
            capacities = [result.capacity or 0 for result in points]
            (line,) = axes.plot(capacities, values, label=policy, marker="o", markersize=4)
            if policy == OPTIMUM:
                line.set(color="0.2", linestyle="--", marker="")
        axes.set(xscale="log", xlabel="capacity (blocks)", ylabel=label, ylim=(0, None))
        ticks = sorted({result.capacity for result in results if result.capacity})
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path)
