"""Whether a picture can be drawn into a file: found out before the work. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path


class PlotUnavailable(RuntimeError):
    """A plot was asked for that cannot be drawn: matplotlib is missing, or the format unknown."""


def check_plot(path: Path) -> None:
    """Find out before the work whether its plot can be drawn.

    Raises:
        PlotUnavailable: it cannot, and why.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(
            f"a plot needs matplotlib ({error}): pip install 'octavo[serve]'"
        ) from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise PlotUnavailable(
            f"cannot draw {path.name!r}: its name must end in one of {', '.join(sorted(formats))}"
        )
