"""Compiling programs before they are needed, several at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

# Each compilation of a large model takes gigabytes while it runs.
_MAX_THREADS = 4


def compile_all(
    programs: Sequence[tuple[str, Callable[[], object]]],
    report: Callable[[int, int, str], None],
) -> int:
    """Run the calls that compile, each by its name; returns how many there were.

    Args:
        programs: (name, call), slowest first.
        report: called with (done, total, what) at the start and after each program.
    """
    report(0, len(programs), programs[0][0])
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
        names = {pool.submit(compile_it): name for name, compile_it in programs}
        for done, finished in enumerate(as_completed(names), start=1):
            finished.result()
            report(done, len(programs), names[finished])
    return len(programs)
