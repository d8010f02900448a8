"""Benchmarks that need a device run without one at tiny sizes: a typo must not cost a turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_gpu_suite_runs_dry() -> None:
    done = run("benchmarks/gpu_suite.py", "--dry-run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for section in ("rates", "decode", "prefill", "cascade", "variants", "movement", "checks"):
        assert f"-- {section}: " in done.stdout
    assert "jax paged_attention: ms=" in done.stdout
    assert done.stdout.endswith("no problems\n")


def test_the_gpu_suite_wants_a_gpu_unless_it_runs_dry() -> None:
    done = run("benchmarks/gpu_suite.py")
    assert done.returncode == 2 and "no GPU here" in done.stderr


@pytest.mark.slow
def test_the_tuner_runs_dry() -> None:
    done = run("benchmarks/tune.py", "--dry-run", "--kernel", "decode", "--heads", "8")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "heuristic {" in done.stdout
    json.loads(done.stdout[done.stdout.rindex("\n[") :])
