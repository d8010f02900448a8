"""A process that is killed while it writes leaves whole blocks and scraps, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def killed_writers(where: Path | str, kills: int) -> list[str]:
    """What `killed_writers.py` tells in the end."""
    program = Path(__file__).with_name("killed_writers.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(where), str(kills)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_whatever_is_readable_after_sixty_kills_is_right(tmp_path):
    scraps, right, wrong, errors, in_budget = killed_writers(tmp_path / "blocks", 60)
    assert int(scraps) > 0, "no kill came in the middle of a write"
    assert int(right) > 0
    assert (wrong, errors, in_budget) == ("0", "0", "True")
