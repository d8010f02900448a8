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


def rows(text):
    """The cells of each line of a table's body."""
    cells = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines())
    return [row for row in cells if row]


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
    options += ["--block-size", "4", "--model", "smollm2-135m"]
    code, text, error = run(
        trace, *options, "--plot", folder / "plot.png", "--json", folder / "figures.json"
    )
    assert code == 0, error
    return text, error, folder


def test_the_table_has_a_row_for_every_policy_capacity_and_bound(replayed):
    text, _, _ = replayed
    names = [(row[0], row[1]) for row in rows(text.partition("with tiers")[0])]
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
    assert figures["model"]["num_layers"] == 30
    assert (figures["hardware"]["name"], figures["num_devices"]) == ("h100", 1)
    results = {(r["policy"], r["capacity"]): r for r in figures["results"]}
    assert len(results) == 7
    best, unlimited = results["optimum", 7], results["unlimited", None]
    assert 0 <= results["lru", 7]["hit_ratio"] <= best["hit_ratio"] <= unlimited["hit_ratio"] < 1
    assert best["gap_closed"] in (1, None)


def test_tiers_below_add_hits_and_save_seconds(tmp_path):
    log, figures = tmp_path / "log.jsonl", tmp_path / "figures.json"
    ids = [[u, 10 + u, 20 + u, 30 + u] for u in (0, 1, 2, 0, 3, 4, 1, 0)]  # four blocks a user
    lines = ({"input_length": 2000, "hash_ids": own} for own in ids)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--policy", "lru", "--capacity", "4", "--host-blocks", "9", "--json", figures]
    code, text, error = run(log, *options)
    assert code == 0, error
    results = json.loads(figures.read_text())["tiers"]
    assert [result["tiers"] for result in results] == [{}, {"host": 9}, {"host": 9, "disk": None}]
    # Three times a user comes again. The first time host memory still has three of the blocks (the
    # fourth is not full, and never there), later only the disk, from where a part is restored.
    found = [result["num_found_blocks"] for result in results]
    assert found == [{}, {"host": 3}, {"host": 3, "disk": 6}]
    hits = [result["hit_ratio"] for result in results]
    assert hits[:2] == [0, 3 / 32]
    assert hits[2] == (3 + results[2]["num_restored_blocks"]["disk"]) / 32 > hits[1]
    saved = [result["saved_seconds"] for result in results]
    assert saved[0] == 0 < saved[1] < saved[2]
    ((capacity, policy, host, disk, *values),) = rows(text.partition("with tiers")[2])
    assert (capacity, policy, host, disk) == ("4", "lru", "9", "∞")
    assert values[:3] == [f"{ratio:.3f}" for ratio in hits]
    assert [float(value) for value in values[3:]] == pytest.approx(saved, rel=0.01)
    # Without one, and without both.
    _, text, _ = run(log, *options, "--disk-blocks", "0")
    assert "+ host" in text and "disk" not in text
    _, text, _ = run(log, *options, "--disk-blocks", "0", "--host-blocks", "0")
    assert "with tiers" not in text


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
        (["{trace}", "--model", "gpt-9"], 2, "gpt-9"),
        (["{trace}", "--hardware", "abacus"], 2, "abacus"),
        (["{trace}", "--devices", "5"], 2, "num_devices=5"),
        (["{trace}", "--host-blocks", "-1"], 2, "--host-blocks"),
        (["{trace}", "--disk-blocks", "few"], 2, "--disk-blocks"),
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
