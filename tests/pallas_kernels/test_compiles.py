"""Every Pallas kernel compiles for chips that are not here, lean enough where that is known."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import kernels_static
import pytest
from static_cases import all_cases, table_cases

from .implementations import JAX_VERSION

pytestmark = [
    pytest.mark.skipif(JAX_VERSION < (0, 12), reason="compiled with JAX 0.12 and later"),
    pytest.mark.skipif(not kernels_static.have_compilers(), reason="`make test` installs them"),
]
CHIPS = (*kernels_static.TPUS, *kernels_static.GPUS)
QUICK_CHIPS = ("v6e", "h200")
NAMES = [case.name for case in all_cases()]


def compiled(chip: str, names: list[str], record: Callable[[str, object], None]) -> None:
    rows = kernels_static.run_chip(chip, names)
    assert sorted(row["case"] for row in rows) == sorted(names)
    for row in rows:
        if row["status"] == "compiled":
            record("kernel_chip", f"{row['case']}, {chip}")
    assert not kernels_static.missed(rows)


@pytest.mark.parametrize(
    "chip", [c if c in QUICK_CHIPS else pytest.param(c, marks=pytest.mark.kernels) for c in CHIPS]
)
def test_decode_and_prefill_compile(
    chip: str, record_property: Callable[[str, object], None]
) -> None:
    compiled(chip, list(kernels_static.QUICK), record_property)


@pytest.mark.kernels
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_compiles(chip: str, record_property: Callable[[str, object], None]) -> None:
    compiled(chip, [name for name in NAMES if name not in kernels_static.QUICK], record_property)


def test_every_row_of_the_table_is_among_the_cases_once() -> None:
    in_table = [case.name for case in all_cases() if case.in_table]
    assert in_table == [case.name for case in table_cases()]
    assert len(set(NAMES)) == len(NAMES)
    for pattern, *_ in kernels_static.TARGETS:
        assert fnmatch.filter(in_table, pattern)


def test_a_kernel_that_takes_the_compiler_down_is_reported() -> None:
    rows = kernels_static.run_chip("h200", ["no such case"])
    assert [row["status"] for row in rows] == ["failed"]
    assert "KeyError" in rows[0]["reason"]
    assert kernels_static.missed(rows)
