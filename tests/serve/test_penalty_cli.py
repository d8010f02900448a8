"""`octavo penalty`: the table, the JSON, the plot, and mistakes found before the work."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, Hardware
from octavo.serve import cost_options
from octavo.serve.cli import app

LONG = ["--model", "llama-3.1-70b", "--prefix", "131072", "--hardware", "h200"]


def run(*arguments, columns="200"):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    options = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, ["penalty", *options], env={"COLUMNS": columns})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def rows(text):
    cells = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines())
    return {row[0]: row[1:] for row in cells if row}


def test_the_table_of_a_long_prefix_agrees_with_a_hand_calculation():
    """On one H200 at 45 % of 989 TFLOP/s, 80 % of 4.8 TB/s, 85 % of 64 GB/s.

    Miss: 2 * 68.45e9 * 131,104 + 80 * 2 * 64 * 128 * 131,104² = 40.48 PFLOP, 90.95 s.
    Hit: 139.0 GB of weights in 36.2 ms, 11 TFLOP of attention in 24.7 ms.
    Restore: 327,680 B * 131,072 = 42.95 GB, in 789.5 ms from the host, and then the hit.
    """
    code, text, error = run(*LONG)
    assert (code, error) == (0, "")
    table = rows(text)
    assert table["miss"][:3] == ["90.95 s", "1", "40.48 P"]
    assert table["hit"][:3] == ["60.91 ms", "1/1,493", "15.38 T"]
    assert table["restore from host"][0] == "850.4 ms"
    assert table["restore from host"][4] == "42.95 GB"
    assert table["restore from disk"][0] == "8.32 s"
    assert table["restore from remote"][0] == "4.356 s"
    # A step reads 139.0 GB of weights and 42.97 GB of keys and values at 3.84 TB/s.
    assert table["decode one token"][0] == "47.39 ms"
    # 42.95 GB in the 90.89 s that a hit saves.
    assert table["host"] == ["54.4 GB/s", "88 tokens on", "472.5 MB/s"]


def test_the_readme_shows_what_the_command_prints():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\$ octavo penalty (.*)\n((?:.*\n)*?)```", readme)
    assert found is not None
    code, text, _ = run(*found[1].split(), columns="110")
    assert code == 0
    assert [line.rstrip() for line in text.splitlines()] == found[2].splitlines()


def test_what_does_not_fit_is_said_with_what_would():
    _, text, _ = run(*LONG)
    assert "does not fit: weights (141.1 GB) and one prompt (42.96 GB)" in text
    assert "--devices 2 hold them" in text
    _, text, _ = run(*LONG, "--tp", "8")
    assert "does not fit" not in text
    assert "pins: 20 such prefixes fit beside the weights of 141.1 GB, 42.95 GB each" in text
    _, text, _ = run(*LONG, "--hardware", "t4")
    assert "does not fit" in text and re.search(r"--devices \d+ hold them|nor do 64 devices", text)


def test_json_holds_the_figures_of_the_table():
    code, text, error = run(*LONG, "--json", "--new", "64", "--devices", "2")
    assert (code, error) == (0, "")
    figures = json.loads(text)
    assert (figures["prefix_len"], figures["num_new"], figures["num_devices"]) == (131_072, 64, 2)
    assert figures["model"]["num_layers"] == 80
    assert figures["hardware"]["peak_flops"] == 989e12
    by_name = {outcome["name"]: outcome for outcome in figures["outcomes"]}
    assert list(by_name) == ["miss", "remote", "disk", "host", "hit", "decode"]
    assert by_name["host"]["moved_bytes"] == 42_949_672_960
    assert figures["fit"]["num_prefixes"] == 2
    assert any("0.45" in note for note in figures["notes"])


def test_rates_that_are_given_take_the_place_of_the_data_sheet():
    options = ["--json", "--link", "20", "--disk", "2", "--remote", "5"]
    figures = json.loads(run(*LONG, *options)[1])
    rates = {tier["tier"]: tier["bytes_per_second"] for tier in figures["break_even"]}
    assert rates == pytest.approx({"host": 20e9, "disk": 2e9, "remote": 5e9})
    assert not any("assumed" in note for note in figures["notes"])


def test_a_model_can_be_a_config_or_a_gguf_file(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 100, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = ["--prefix", "100", "--json"]
    shape = json.loads(run("--model", tmp_path, *options)[1])["model"]
    assert (shape["num_heads"], shape["kv_dtype_bytes"]) == (4, 4)
    shape = json.loads(run("--model", "smollm2", *options)[1])["model"]  # a GGUF file
    assert shape == {"name": "smollm2", **vars(MODEL_SHAPES["smollm2-135m"])}
    half = json.loads(run("--model", tmp_path, *options, "--dtype", "bfloat16")[1])["model"]
    assert half["kv_dtype_bytes"] == half["param_dtype_bytes"] == 2


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_drawn(tmp_path, ending):
    path = tmp_path / f"plot.{ending}"
    for options in (LONG, [*LONG[:2], "--prefix", "5", "--hardware", "t4"]):
        code, text, _ = run(*options, "--plot", path)
        assert code == 0 and "miss" in text
        assert path.stat().st_size > 10_000
        path.unlink()


def test_this_machine_is_measured_in_the_dtype_that_it_serves_in(tmp_path, monkeypatch):
    asked = {}

    def calibrate(shape, *, chunk_size, disk_folder):
        asked.update(bytes=shape.kv_dtype_bytes, chunk_size=chunk_size, folder=disk_folder)
        return Hardware(
            name="this machine",
            peak_flops=1e11,
            peak_memory_bytes=2e10,
            memory_bytes=1e10,
            peak_link_bytes=5e9,
        )

    monkeypatch.setattr(cost_options, "calibrate", calibrate)
    options = ["--model", "smollm2-135m", "--prefix", "1000", "--hardware", "this"]
    code, text, _ = run(*options, "--disk-folder", tmp_path, "--chunk-size", "64")
    assert code == 0 and "this machine" in text
    assert asked == {"bytes": 4, "chunk_size": 64, "folder": tmp_path}

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_options, "calibrate", fail)
    code, text, error = run(*options)
    assert (code, text) == (1, "") and "No space left" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefix", "0"], "--prefix"),
        (["--prefix", "long"], "--prefix"),
        (["--new", "0"], "--new"),
        (["--model", "gpt-9"], "--model: 'gpt-9'"),
        (["--model", "{dir}/none.gguf"], "none.gguf"),
        (["--hardware", "abacus"], "'abacus' is none of this, a100"),
        (["--devices", "3"], "num_devices=3 cannot share 64 query heads and 8 KV heads"),
        (["--devices", "0"], "--devices"),
        (["--chunk-size", "0"], "--chunk-size"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--disk", "0"], "--disk: 0"),
        (["--link", "nan"], "--link: nan"),
        (["--disk-folder", "{dir}"], "only --hardware this"),
        (["--disk-folder", "{dir}/none"], "--disk-folder"),
        (["--plot", "{dir}/plot.xyz"], "must end in one of"),
        (["--plot", "{dir}/none/plot.png"], "there is no"),
        (["--plot", "{dir}"], "is a directory"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_clear_error(tmp_path, options, words):
    code, text, error = run(*LONG, *(option.format(dir=tmp_path) for option in options))
    assert code == 2
    assert words in " ".join(error.split())
    assert text == ""


def test_a_broken_gguf_file_is_one_clear_error(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03")
    code, _, error = run(*LONG, "--model", path)
    assert code == 2 and "broken.gguf" in error


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, error = run(*LONG, "--plot", tmp_path / "plot.png")
    assert code == 2
    assert "pip install 'octavo[serve]'" in error


@pytest.mark.parametrize("machine", HARDWARE)
def test_every_machine_of_the_table_has_its_figures(machine):
    code, text, error = run("--model", "llama-3.1-8b", "--prefix", "4096", "--hardware", machine)
    assert (code, error) == (0, "")
    assert {"miss", "hit", "restore from disk"} <= rows(text).keys()
