"""Random operations on the block manager and on the plain-Python model mean the same.

`OCTAVO_MODEL_RUNS` runs of `OCTAVO_MODEL_STEPS` operations for each eviction policy. At length:

    OCTAVO_MODEL_RUNS=200 OCTAVO_MODEL_STEPS=200 pytest tests/paged/test_against_model.py

and with all hashes equal: pytest --constant-hash.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from octavo.paged import hashing

from .machine import machine

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROOT = Path(__file__).resolve().parents[2]

RUNS = settings(
    max_examples=int(os.environ.get("OCTAVO_MODEL_RUNS", "15")),
    stateful_step_count=int(os.environ.get("OCTAVO_MODEL_STEPS", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ("lru", 2),
        ("cost", 4),
        pytest.param("lfu", 4, marks=pytest.mark.slow),
        pytest.param("slru", 2, marks=pytest.mark.slow),
    ],
)
def test_random_operations_mean_the_same(policy: str, size: int) -> None:
    run_state_machine_as_test(machine(policy, size), settings=RUNS)


def test_a_hash_is_constant_if_and_only_if_asked_for(pytestconfig: pytest.Config) -> None:
    tokens = jnp.arange(64, dtype=jnp.int32).reshape(16, 4)
    hashes = [
        jax.jit(hashing.chain_hashes)(tokens, 3),
        jax.jit(hashing.extend_hash)(hashing.root_hash(5)[None], tokens),
        jax.jit(hashing.child_key)(tokens[:, 0], tokens[:, 1], tokens[:, 2]),
        jax.jit(hashing.bucket_of, static_argnums=1)(tokens[:, 0].astype(jnp.uint32), 1 << 20),
    ]
    distinct = [len(set(np.asarray(h).tolist())) for h in hashes]
    assert distinct == [1 if pytestconfig.getoption("constant_hash") else 16] * len(hashes)


@pytest.mark.slow
def test_a_constant_hash_changes_nothing_but_speed(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("constant_hash"):
        pytest.skip("this is the run that the test would start")
    command = [sys.executable, "-m", "pytest", "--constant-hash", "-q", "-p", "no:cacheprovider"]
    command += [__file__, "-k", "cost-4 or is_constant"]
    few = {"OCTAVO_MODEL_RUNS": "5", "OCTAVO_MODEL_STEPS": "40"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **few}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
