"""Notebooks run from top to bottom and show what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


def test_every_notebook_has_a_test() -> None:
    names = ["branching", "lora", "miss_penalty", "own_model", "prefix_reuse"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.slow
def test_the_prefix_is_paid_for_once(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "prefix_reuse.py"))
    out = capsys.readouterr().out
    rows = [row.split() for row in re.findall(r"^ *[\d.]+s +\d+ +\d+$", out, re.MULTILINE)]
    cached = [int(row[2]) for row in rows]
    assert cached[0] == 0 and min(cached[1:]) > 1000
    assert "active 0 of 399" in out
    assert re.search(r"^1\d\d\d of \d+ tokens are cached: token \d+ is \d+", out, re.M)
    assert "another model, adapter, cache type or tenant shares nothing" in out
    prompt, computed = map(int, re.findall(r"^(?:prompt tokens|computed) +(\d+)$", out, re.M))
    assert computed < 0.5 * prompt


@pytest.mark.slow
def test_a_miss_is_paid_and_a_hit_and_a_restore_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "miss_penalty.py"))
    out = capsys.readouterr().out
    assert "attention of 131,072 tokens: 22.5 PFLOP, a layer 281.5 TFLOP" in out
    row = r"^ +(\d+) miss +([\d.]+) ms host +([\d.]+) ms hit +([\d.]+) ms$"
    measured = {int(n): list(map(float, ms)) for n, *ms in re.findall(row, out, re.MULTILINE)}
    assert list(measured) == [128, 256, 512, 1024]
    miss, host, hit = measured[1024]
    assert hit < miss and host < miss
    assert re.search(r"^predicted miss at 1024: [\d.]+ ms$", out, re.MULTILINE)
    cached = re.findall(r"^varying tokens \w+: +(\d+) of 528 cached", out, re.MULTILINE)
    assert list(map(int, cached)) == [512, 0]


@pytest.mark.slow
def test_a_model_of_ones_own_equals_its_unpaged_twin(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "own_model.py"))
    out = capsys.readouterr().out
    errors = re.findall(r"^150 tokens, (\d+) cached: off by ([\de.-]+)$", out, re.M)
    assert [cached for cached, _ in errors] == ["0", "120"]
    assert all(float(error) < 1e-5 for _, error in errors)
    assert out.count("equal to the unpaged model's: True") == 2
    assert "active blocks after both are released: 0" in out


@pytest.mark.slow
def test_branches_share_what_they_have_in_common(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "branching.py"))
    out = capsys.readouterr().out
    numbers = dict(re.findall(r"^([a-z][\w ]+?) (\d+)(?: |$)", out, re.MULTILINE))
    root = int(re.findall(r"blocks (\d+)$", out, re.MULTILINE)[0])
    assert int(numbers["blocks after three forks"]) == root
    assert int(numbers["prompt tokens computed for them"]) <= 3
    # Sixteen tokens of its own, in two blocks at most, of which one may begin as the root's last.
    assert root < int(numbers["blocks after their answers"]) <= root + 3 * 2
    assert int(numbers["cached"]) > 400 and int(numbers["active blocks"]) == 0
    assert len(re.findall(r"^ +-\d+\.\d+ '", out, re.MULTILINE)) == 3


@pytest.mark.slow
def test_adapters_trained_in_a_notebook_answer_in_one_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with jax.numpy_dtype_promotion("standard"):  # as anybody's; Adam in optax relies on it
        runpy.run_path(str(FOLDER / "lora.py"))
    out = capsys.readouterr().out
    losses = re.findall(r"^loss ([\d.]+) -> ([\d.]+)$", out, re.MULTILINE)
    assert len(losses) == 2 and all(float(end) < 0.5 < float(start) for start, end in losses)
    answers = re.findall(r"^(\w+), (\d+) cached:(.+)$", out, re.MULTILINE)
    assert [cached for _, cached, _ in answers] == ["0"] * 3 + ["7"] * 3 + ["0"]
    by_name = {name: text for name, _, text in answers}
    assert "I keep the lighthouse" in by_name["keeper"]
    assert "I bake the bread" in by_name["baker"] and by_name["reloaded"] == by_name["baker"]
    assert "lighthouse" not in by_name["None"] and "bread" not in by_name["None"]
