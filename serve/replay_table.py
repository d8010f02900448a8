"""What `octavo replay` prints: policies by capacity, and what tiers below would add."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..paged.replay import ReplayResult, TierResult, Trace
from .console import err

_TABLE_WIDTH = 110  # where stdout is no terminal and so has none


def print_replay(
    trace: Trace,
    results: Sequence[ReplayResult],
    tiers: Sequence[TierResult],
    *,
    title: str,
) -> None:
    """Print both tables and what they rest on."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=max(out.width, _TABLE_WIDTH))
    out.print(_policies(results, title))
    out.print(
        f"{trace.num_requests:,} requests, {len(trace.symbols):,} blocks of "
        f"{trace.tokens_per_block} tokens looked up, {trace.num_symbols:,} distinct; gap: saved "
        "FLOPs from lru (0) to optimum (1)",
        soft_wrap=True,
    )
    if refused := {r.capacity: r.num_refused for r in results if r.num_refused}:
        sizes = ", ".join(f"{count:,} at {size:,}" for size, count in refused.items() if size)
        err.print(f"requests larger than the cache, computed in full: {sizes}", soft_wrap=True)
    if any(result.tiers for result in tiers):
        out.print(_tiers(tiers))
        out.print(
            "hits: of the blocks looked up; saved: predicted seconds less than without any cache. "
            "What is below the device and yet sooner computed than restored is no hit",
            soft_wrap=True,
        )


def _policies(results: Sequence[ReplayResult], title: str) -> Table:
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
    return table


def _tiers(results: Sequence[TierResult]) -> Table:
    """A line for each device: alone, and with each tier more."""
    lines: dict[tuple[int, str], list[TierResult]] = {}
    for result in results:
        lines.setdefault((result.capacity, result.policy), []).append(result)
    names = list(results[-1].tiers)
    table = Table(title="with tiers below the device", title_justify="left")
    table.add_column("capacity", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in names:
        table.add_column(f"blocks\n{name}", justify="right", no_wrap=True)
    for what in ("hits", "saved s"):
        for name in ("device", *(f"+ {name}" for name in names)):
            table.add_column(f"{what}\n{name}", justify="right", no_wrap=True)
    previous = results[0].capacity
    for (capacity, policy), line in lines.items():
        if capacity != previous:
            table.add_section()
        previous = capacity
        table.add_row(
            f"{capacity:,}",
            policy,
            *("∞" if size is None else f"{size:,}" for size in line[-1].tiers.values()),
            *(f"{result.hit_ratio:.3f}" for result in line),
            *(_number(result.saved_seconds) for result in line),
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
