"""What `miss_penalty.py` has measured: a table, a plot, and the targets that were missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# What the longest length must come to: share of a cold prefill's time, error of a prediction, a
# cold prefill's share of the FLOP/s of products, and a restore in units of its floor: a hit and one
# copy of the bytes.
TARGETS = {"hit": 1 / 200, "host": 1 / 20}
MAX_ERROR, MIN_RATE, MAX_OF_FLOOR = 0.25, 0.7, 1.1


def table(rows: list[dict[str, Any]], modes: list[str]) -> str:
    """Markdown: measured milliseconds, the prediction's error, and what would be chosen."""
    names = ["miss", *reversed(modes[1:]), "hit"]
    lines = [
        "| prefix | KV MB | TFLOP | "
        + " | ".join(f"{n} ms" for n in names)
        + " | miss / hit | miss / host | host / floor | GFLOP/s | of the best product | equal |",
        "|--:" * (len(names) + 9) + "|",
    ]
    for row in rows:
        cells = []
        for name in names:
            cell = f"{1e3 * row['seconds'][name]:,.0f}"
            if row["predicted"]:
                error = row["predicted"][name] / row["seconds"][name] - 1
                cell += f" ({error:+.0%})"
            cells.append(cell)
        seconds = row["seconds"]
        lines.append(
            f"| {row['length']:,} | {row['kv_bytes'] / 1e6:,.1f} | {row['flops'] / 1e12:,.2f} | "
            + " | ".join(cells)
            + f" | {seconds['miss'] / seconds['hit']:,.0f} | "
            + f"{seconds['miss'] / seconds['host']:,.1f} | {of_floor(row):.2f} | "
            + f"{row['flops_per_second'] / 1e9:,.0f} | "
            + f"{row['flops_per_second'] / row['product_flops_per_second']:.0%} | "
            + f"{'yes' if row['equal'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def of_floor(row: dict[str, Any]) -> float:
    """A restore from host memory in units of a hit and one copy of the bytes."""
    return row["seconds"]["host"] / (row["seconds"]["hit"] + row["copy_seconds"])


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that the longest length misses, and lengths whose answers differ."""
    last, found = rows[-1], [f"{r['length']}: answers differ" for r in rows if not r["equal"]]
    for mode, share in TARGETS.items():
        got = last["seconds"][mode] / last["seconds"]["miss"]
        if got > share:
            found.append(f"{mode} takes {got:.4f} of a miss, more than {share:.4f}")
    for row in rows:
        for mode, seconds in (row["predicted"] or {}).items():
            error = seconds / row["seconds"][mode] - 1
            if abs(error) > MAX_ERROR:
                found.append(f"{row['length']} {mode}: predicted {error:+.0%}")
    if of_floor(last) > MAX_OF_FLOOR:
        found.append(f"a restore from host memory takes {of_floor(last):.2f} of its floor")
    rate = last["flops_per_second"] / last["product_flops_per_second"]
    if rate < MIN_RATE:
        found.append(f"a cold prefill reaches {rate:.2f} of the best product's FLOP/s")
    return found


def plot(rows: list[dict[str, Any]], modes: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    lengths = [row["length"] for row in rows]
    for mode in ("miss", *reversed(modes[1:]), "hit"):
        (line,) = axes.plot(lengths, [r["seconds"][mode] for r in rows], "o-", label=mode)
        later = [r for r in rows if r["predicted"]]
        axes.plot(
            [r["length"] for r in later],
            [r["predicted"][mode] for r in later],
            "x:",
            color=line.get_color(),
        )
    axes.set(xscale="log", yscale="log", xlabel="prefix, tokens", ylabel="seconds to first token")
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_title("Measured (points) and predicted (crosses)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
