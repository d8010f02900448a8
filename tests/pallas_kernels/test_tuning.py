"""Measured knobs override the heuristic's, where they are for that kernel, chip and shape."""

from __future__ import annotations

import dataclasses
import json

import pytest

from octavo.pallas_kernels import CHIPS, Tuning, kernel_tuning
from octavo.pallas_kernels.tuning import SHIPPED, tuned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knobs:
    tile: int
    stages: int


GUESS = Knobs(tile=64, stages=2)


def entry(**changes) -> dict:
    row = {"kernel": "k", "chip": "h200", "when": {"head_size": 128}, "knobs": {"tile": 32}}
    return row | changes


def read(*rows: dict) -> Tuning:
    return Tuning.from_json(json.dumps(rows))


def test_an_entry_overrides_only_the_knobs_it_names_where_it_fits() -> None:
    h200, b200 = CHIPS["H200"], CHIPS["B200"]
    with kernel_tuning(read(entry())):
        assert tuned("k", h200, GUESS, head_size=128) == Knobs(tile=32, stages=2)
        assert tuned("k", h200, GUESS, head_size=64) == GUESS
        assert tuned("k", b200, GUESS, head_size=128) == GUESS
        assert tuned("other", h200, GUESS, head_size=128) == GUESS
    assert tuned("k", h200, GUESS, head_size=128) == GUESS


def test_the_first_entry_that_fits_counts() -> None:
    special = entry(when={"head_size": 128, "block_size": 16}, knobs={"tile": 16})
    with kernel_tuning(read(special, entry())):
        assert tuned("k", CHIPS["H200"], GUESS, head_size=128, block_size=16).tile == 16
        assert tuned("k", CHIPS["H200"], GUESS, head_size=128, block_size=32).tile == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "expected a JSON list"),
        (json.dumps([{"kernel": "k"}]), "has the fields"),
        (json.dumps([entry(when={"head_size": [1]})]), "when="),
        (json.dumps([entry(knobs={"tile": "big"})]), "knobs="),
    ],
)
def test_a_file_that_is_no_tuning_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning.from_json(text)


def test_an_unknown_knob_is_named() -> None:
    with (
        kernel_tuning(read(entry(knobs={"tiles": 1}))),
        pytest.raises(ValueError, match=r"k has no knobs \['tiles'\]"),
    ):
        tuned("k", CHIPS["H200"], GUESS, head_size=128)


def test_the_shipped_file_reads() -> None:
    Tuning.from_json(SHIPPED.read_text())
