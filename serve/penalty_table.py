"""What `octavo penalty` prints: the ways to the first token, where they break even, what to pin."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..paged.cost_model import CostModel, MissPenalty, kv_bytes
from ..paged.cost_model.penalty import MEMORY_SHARE

_TABLE_WIDTH = 110  # where stdout is no terminal and so has none
_NAMES = {"decode": "decode one token"}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def print_penalty(costs: CostModel, result: MissPenalty, *, model: str) -> None:
    """Print tables and notes on stdout."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=max(out.width, _TABLE_WIDTH))
    out.print(_outcomes(costs, result, model))
    out.print(_break_even(result))
    for line in (*_pins(costs, result), *notes(costs, result)):
        out.print(line, soft_wrap=True, markup=False)


def notes(costs: CostModel, result: MissPenalty) -> list[str]:
    """What the figures rest on, and whether the devices can hold what they are about."""
    fit, machine = result.fit, costs.hardware
    lines = []
    if not fit.fits:
        prompt = kv_bytes(costs.device_shape, result.prefix_len + result.num_new)
        where = (
            f"--devices {fit.needed_devices} hold them"
            if fit.needed_devices
            else f"nor do {costs.shape.num_heads} devices, one per query head"
        )
        lines.append(
            f"does not fit: weights ({si(fit.weight_bytes, 'B')}) and one prompt "
            f"({si(prompt, 'B')}) do not fit {100 * MEMORY_SHARE:.0f} % of the memory of "
            f"{costs.num_devices} × {machine.name} ({si(fit.usable_bytes, 'B')}); {where}. "
            "The figures are what they would be if it did"
        )
    shares = ", ".join(
        f"{name} {share:.2f}"
        for name, share in vars(machine.efficiency).items()
        if share is not None
    )
    lines.append(f"of each peak is reached: {shares}")
    if costs.num_devices > 1:
        lines.append("not counted apart: what devices say to one another lowers the shares reached")
    lines.extend(f"assumed: {text}" for text in machine.assumptions)
    return lines


def _outcomes(costs: CostModel, result: MissPenalty, model: str) -> Table:
    title = (
        f"{model} on {costs.num_devices} × {costs.hardware.name}: {result.prefix_len:,} tokens "
        f"({si(kv_bytes(costs.shape, result.prefix_len), 'B')} of KV) and {result.num_new:,} new"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("takes", "of a miss", "FLOP", "memory", "moved", "FLOP/B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    miss = result.by_name["miss"].seconds
    for outcome in result.outcomes:
        if outcome.name == "decode":
            table.add_section()
        restored = outcome.name in costs.tiers
        table.add_row(
            f"restore from {outcome.name}" if restored else _NAMES.get(outcome.name, outcome.name),
            si(outcome.seconds, "s"),
            "" if outcome.name == "decode" else _ratio(outcome.seconds / miss),
            si(outcome.flops, ""),
            si(outcome.memory_bytes, "B"),
            si(outcome.moved_bytes, "B") if outcome.moved_bytes else "",
            f"{outcome.intensity:,.3g}",
            outcome.bound_by,
        )
    return table


def _break_even(result: MissPenalty) -> Table:
    table = Table(title="where restoring beats computing", title_justify="left")
    table.add_column("from", no_wrap=True)
    for name in ("brings", "wins from", f"wins for {result.prefix_len:,} tokens from"):
        table.add_column(name, justify="right", no_wrap=True)
    for tier in result.break_even:
        table.add_row(
            tier.tier,
            si(tier.bytes_per_second, "B/s"),
            _from(tier.length),
            si(tier.needed_bytes_per_second, "B/s"),
        )
    return table


def _pins(costs: CostModel, result: MissPenalty) -> list[str]:
    fit = result.fit
    saved = ", ".join(
        f"{si(seconds, 's')} against {'computing it' if name == 'miss' else name}"
        for name, seconds in result.saved_by_pin.items()
    )
    return [
        f"pins: {fit.num_prefixes:,} such prefixes fit beside the weights of "
        f"{si(fit.weight_bytes, 'B')}, {si(fit.prefix_bytes, 'B')} each; "
        f"a hit on one saves {saved}"
    ]


def si(value: float, unit: str) -> str:
    """Three or four digits with a decimal prefix: 42.95 GB, 7.613 ms."""
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 1 or name == "µs":
                return f"{value * factor:,.4g} {name}" if value < 1e4 else f"{value:,.0f} s"
    power = 0
    while value >= 999.95 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.4g} {_PREFIXES[power]}{unit}".rstrip()


def _from(length: int | None) -> str:
    if length is None:
        return "never"
    return "any length" if length == 1 else f"{length:,} tokens on"


def _ratio(value: float) -> str:
    return "1" if value == 1 else f"{value:.3g}" if value > 0.01 else f"1/{1 / value:,.0f}"
