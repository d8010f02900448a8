"""The simulated kernels, in a process that has enough threads for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .implementations import CAN_SIMULATE, JAX_VERSION, NPROC

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(CAN_SIMULATE, reason="this process runs them itself")
def test_simulated_kernels_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/pallas_kernels", "-m", "simulated", "-q"],
        cwd=ROOT,
        env=os.environ | {"NPROC": NPROC},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ran = re.search(r"(\d+) passed", done.stdout)
    assert ran is not None and int(ran[1]) >= (10 if JAX_VERSION >= (0, 12) else 1)
