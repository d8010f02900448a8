"""`octavo replay`: the table, the file of figures, the plot, and mistakes found before the work."""

import json
import sys

import pytest
from typer.testing import CliRunner

from octavo.serve.cli import app

LINES = [{"tokens": [*range(8), *([0] * n), *range(8)]} for n in (0, 4, 8, 0, 12, 4, 0, 16, 8, 0)]


def run(*arguments, columns="200"):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    options = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, ["replay", *options], env={"COLUMNS": columns})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The output of one replay and its files."""
    folder = tmp_path_factory.mktemp("replay")
    trace = folder / "log.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    options = ["--policy", "lru", "--policy", "cost", "--capacity", "7", "--capacity", "4"]
    options += ["--block-size", "4", "--model-shape", "smollm2-135m"]
    code, text, error = run(
        trace, *options, "--plot", folder / "plot.png", "--json", folder / "figures.json"
    )
    assert code == 0, error
    return text, error, folder


def test_the_table_has_a_row_for_every_policy_capacity_and_bound(replayed):
    text, _, _ = replayed
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    names = [(row[1], row[2]) for row in rows if len(row) > 2]
    policies = ("lru", "cost", "optimum")
    assert names == [
        *(("4", p) for p in policies),
        *(("7", p) for p in policies),
        ("∞", "unlimited"),
    ]
    assert "10 requests" in text


def test_requests_larger_than_a_cache_are_reported(replayed):
    _, error, _ = replayed
    assert "in full: 6 at 4, 1 at 7" in error


def test_the_figures_in_the_file_say_what_they_are_of(replayed):
    _, _, folder = replayed
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["trace"] == "log.jsonl"
    assert figures["num_requests"] == len(LINES)
    assert figures["tokens_per_block"] == 4
    assert figures["model_shape"]["num_layers"] == 30
    assert figures["hardware"]["name"] == "h100"
    results = {(r["policy"], r["capacity"]): r for r in figures["results"]}
    assert len(results) == 7
    best, unlimited = results["optimum", 7], results["unlimited", None]
    assert 0 <= results["lru", 7]["hit_ratio"] <= best["hit_ratio"] <= unlimited["hit_ratio"] < 1
    assert best["gap_closed"] in (1, None)


def test_the_plot_is_a_picture(replayed):
    _, _, folder = replayed
    picture = (folder / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.parametrize(
    ("options", "exit_code", "words"),
    [
        ([], 2, "TRACE"),
        (["{dir}/none.jsonl"], 1, "No such file"),
        (["{dir}"], 1, "directory"),
        (["{trace}", "--policy", "best"], 2, "'best' is none of lru, lfu, slru, cost"),
        (["{trace}", "--capacity", "0"], 2, "--capacity"),
        (["{trace}", "--capacity", "many"], 2, "--capacity"),
        (["{trace}", "--block-size", "0"], 2, "--block-size"),
        (["{trace}", "--model-shape", "gpt-9"], 2, "gpt-9"),
        (["{trace}", "--hardware", "abacus"], 2, "abacus"),
        (["{trace}", "--plot", "{dir}/plot.xyz"], 2, "must end in one of"),
        (["{trace}", "--plot", "{dir}/none/plot.png"], 2, "there is no"),
        (["{trace}", "--json", "{dir}"], 2, "is a directory"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_error(trace, tmp_path, options, exit_code, words):
    code, text, error = run(*(o.format(trace=trace, dir=tmp_path) for o in options))
    assert code == exit_code
    assert words in error
    assert text == ""


def test_a_corrupt_trace_is_an_error_with_its_line(trace):
    with trace.open("a") as file:
        file.write('{"tokens": [1, 2')
    code, _, error = run(trace)
    assert code == 1
    assert f"{trace}:{len(LINES) + 1}: found" in error


def test_a_plot_without_matplotlib_is_refused_before_the_replay(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, error = run(trace, "--plot", tmp_path / "plot.png")
    assert code == 2
    assert "pip install 'octavo[serve]'" in error
