"""How much was checked, in numbers, at the end of a run."""

from __future__ import annotations

import pytest

from .implementations import CAN_SIMULATE

PAIRS = {
    "kernel_case": "(kernel, case, implementation)",
    "kernel_chip": "(kernel, chip), compiled",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the simulated cases to `test_simulated.py`, which has the threads for them."""
    if not CAN_SIMULATE:
        left_out = [item for item in items if item.get_closest_marker("simulated")]
        items[:] = [item for item in items if not item.get_closest_marker("simulated")]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen: dict[str, set[object]] = {name: set() for name in PAIRS}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", ()):
            if name in seen:
                seen[name].add(value)
    for name, what in PAIRS.items():
        if seen[name]:
            terminalreporter.write_line(f"{len(seen[name])} pairs of {what}")
