"""What the claims came to, as Markdown, with the published figures beside."""

from __future__ import annotations

from typing import Any

from claims_sharing import BEAMS, SAMPLED

# Kwon et al., SOSP 2023 (arXiv:2309.06180): figure 2, and section 6.3 on OPT-13B.
PUBLISHED_USED = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "paged": 0.963}
PUBLISHED_SAVED = {
    "instructions": {SAMPLED: (0.061, 0.098), BEAMS: (0.376, 0.552)},
    "chat": {SAMPLED: (0.162, 0.305), BEAMS: (0.443, 0.663)},
}
LOADS_LIKE = {"instructions": "Alpaca", "chat": "ShareGPT"}
# Zheng et al., NeurIPS 2024 (arXiv:2312.07104), section 6.
PUBLISHED_REUSE = "up to 6.4× the throughput of other systems, hit rates from 0.50 to 0.99"
MEMORY = {
    "max": "in one piece, for the longest there may be",
    "pow2": "in one piece, for the output to a power of two",
    "oracle": "in one piece, as if its length were known",
    "paged": "in blocks of 16",
}


def as_markdown(about: dict[str, Any], found: dict[str, Any]) -> str:
    """All tables. `about` says what they were measured on, `found` has the figures of each part."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        "# The classic claims, beside what was published",
        "",
        f"`benchmarks/claims.py`, {about['model']} on {about['device']}, Python {about['python']}, "
        f"{versions}, commit {about['commit']}; {about['seconds']:.0f} s.",
    ]
    tables = {"waste": _waste, "sharing": _sharing, "reuse": _reuse}
    for part, figures in found.items():
        lines += ["", *tables[part](figures)]
    return "\n".join(lines) + "\n"


def _waste(figures: dict[str, Any]) -> list[str]:
    lines = [
        "## Memory that holds tokens",
        "",
        f"{figures['num_requests']} requests with the lengths of real conversations, a cache of "
        f"{figures['num_slots']:,} slots: its mean shares while requests wait. What holds no "
        "tokens is reserved for those to come, given to a request that will not use it "
        "(internal), or to nobody (external). Published: Kwon et al. 2023, figure 2, on other "
        "traces.",
        "",
        "| memory is given | holds tokens | published | reserved | internal | external | at once |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, row in figures["shares"].items():
        cells = [MEMORY[key], f"{row['used']:.1%}", f"{PUBLISHED_USED[key]:.1%}"]
        cells += [f"{row[part]:.1%}" for part in ("reserved", "internal", "external")]
        lines.append(_row([*cells, f"{row['mean_batch']:.1f} requests"]))
    return lines


def _sharing(figures: dict[str, Any]) -> list[str]:
    widths = list(next(iter(figures.values()))[SAMPLED])
    lines = [
        "## Memory saved by sharing",
        "",
        "Blocks that are not needed because others hold the same, over those that would be needed; "
        "the mean over all steps. Published: Kwon et al. 2023, section 6.3, widths 2 to 6.",
        "",
        _row(["prompts and answers", "", *(f"width {width}" for width in widths), "published"]),
        "|---" * (3 + len(widths)) + "|",
    ]
    for load, by_way in figures.items():
        for way, by_width in by_way.items():
            low, high = PUBLISHED_SAVED[load][way]
            cells = [f"{load}, as long as {LOADS_LIKE[load]}'s", way]
            cells += [f"{share:.1%}" for share in by_width.values()]
            lines.append(_row([*cells, f"{low:.1%} to {high:.1%}"]))
    return lines


def _reuse(figures: dict[str, Any]) -> list[str]:
    lines = [
        "## Throughput with prefix reuse",
        "",
        "The same requests without and with reuse, from an empty cache, with equal answers; "
        f"medians. Published, over all workloads: {PUBLISHED_REUSE} (Zheng et al. 2024).",
        "",
        "| workload | requests | without | with | speed-up | hit rate | prompt tokens computed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        rates = [row["num_requests"] / row[key] for key in ("seconds_off", "seconds_on")]
        cells = [name, str(row["num_requests"]), *(f"{rate:.2f} per s" for rate in rates)]
        cells += [f"{row['speedup']:.1f}×", f"{row['hit_rate']:.2f}"]
        lines.append(_row([*cells, f"{row['computed_off']:,} → {row['computed_on']:,}"]))
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
