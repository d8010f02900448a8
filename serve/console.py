"""What commands share: messages on stderr, a progress bar there, a quiet end by Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .explain_compile import ProgramReport

ProgressFn = Callable[[int, int, str], None]

USAGE_ERROR = 2
RUN_ERROR = 1

err = Console(stderr=True, highlight=False)


def give_up(message: str, code: int) -> NoReturn:
    """End the command with a message on stderr and an exit code."""
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """End with code 130 and without a traceback when interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressFn]:
    """A bar on stderr, if that is a terminal, moved by `show(done, total, what)`; 0: unknown."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        yield show


def print_programs(reports: Iterable[ProgramReport]) -> None:
    """A line on stdout for each compiled program, as it is done, and one for all of them."""
    num_programs, total = 0, 0.0
    for report in reports:
        num_programs, total = num_programs + 1, total + report.seconds
        how = "loaded" if report.was_kept else "compiled"
        what = f"{report.name:<16}{report.size:<14}"
        typer.echo(f"{what} {how:<9}{report.seconds:7.2f} s  {report.why}")
    typer.echo(f"{num_programs} programs, {total:.1f} s; serving compiles no others")
