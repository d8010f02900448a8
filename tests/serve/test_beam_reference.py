"""Beam search against Hugging Face transformers', on SmolLM2; see tests/data/README.md."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from octavo.models import LoadedModel
from octavo.serve import BeamSearchParams, Engine

from .conftest import CONFIG

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "beam_reference.json").read_text())
# `make test-exactness` takes all ten. These two are a text with many ends and a chat that ends.
CASES = {"some": (3, 7), "all": range(10)}[os.environ.get("OCTAVO_BEAM_CASES", "some")]


@pytest.fixture(scope="module")
def engine(smollm2: LoadedModel) -> Engine:
    return Engine(smollm2, CONFIG)


@pytest.mark.parametrize("number", CASES)
def test_beams_find_what_transformers_finds(engine: Engine, number: int) -> None:
    case = REFERENCE["cases"][number]
    params = BeamSearchParams(
        beam_width=REFERENCE["width"],
        max_tokens=REFERENCE["max_tokens"],
        num_return_sequences=len(case["answers"]),
        stop_token_ids=tuple(case["stop_token_ids"]),
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )
    answers = engine.beam_search(case["prompt"], params)
    assert [list(a.token_ids) for a in answers] == [a["tokens"] for a in case["answers"]]
    for answer, wanted in zip(answers, case["answers"], strict=True):
        assert answer.score == pytest.approx(wanted["score"], abs=2e-3)
    assert engine.stats().num_active_blocks == 0
