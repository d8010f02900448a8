"""The `octavo` command: options, errors without tracebacks, and a server from start to end."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from octavo.serve import EngineConfig
from octavo.serve.cli import app

OCTAVO = Path(sysconfig.get_path("scripts")) / "octavo"
PROMPT = "The capital of France is"
# Two programs are all that such an engine compiles.
SMALL = [
    *("--max-model-len", "2048", "--num-blocks", "160"),
    *("--max-num-seqs", "1", "--max-num-batched-tokens", "16"),
]


def run(*arguments):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def run_script(*arguments):
    """Runs the installed command."""
    return subprocess.run(
        [OCTAVO, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_the_version_is_the_distributions():
    assert run("--version") == (0, f"octavo {version('octavo')}\n", "")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_field_of_the_config_is_an_option(command):
    code, text, _ = run(command, "--help")
    assert code == 0
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["serve"], 2, "MODEL"),
        (["fly"], 2, "fly"),
        (["serve", "smollm2", "--port", "70000"], 2, "port"),
        (["serve", "smollm2", "--port", "http"], 2, "port"),
        (["serve", "smollm2", "--unheard-of", "1"], 2, "unheard-of"),
        (["generate", "smollm2"], 2, "PROMPT"),
        (["generate", "smollm2", PROMPT, "--temperature", "-1"], 2, "--temperature"),
        (["generate", "smollm2", PROMPT, "--top-p", "2"], 2, "--top-p"),
        (["generate", "smollm2", PROMPT, "--max-tokens", "0"], 2, "--max-tokens"),
        (["generate", "no-such-model", PROMPT], 1, "no-such-model"),
        (["serve", "no-such-model", "--port", "0"], 1, "no-such-model"),
        (["serve", "/no/such/model.gguf", "--port", "0"], 1, "/no/such/model.gguf"),
        (["generate", __file__, PROMPT], 1, "test_cli.py"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_error(arguments, exit_code, words):
    code, text, error = run(*arguments)
    assert code == exit_code
    assert words in error
    assert text == ""
    assert "Traceback" not in error


def test_a_busy_port_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, error = run("serve", "no-such-model", "--port", port)
    assert code == 1
    assert port in error and "--port" in error
    assert "no-such-model" not in error


@pytest.mark.slow
def test_generate_prints_the_text_and_a_line_of_figures():
    options = ["--max-tokens", "8", "--temperature", "0"]
    done = run_script("generate", "smollm2", PROMPT, *options, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    figures = done.stderr.strip().splitlines()[-1]
    assert figures.startswith("8 tokens, 0 of 5 prompt tokens cached, TTFT ")
    assert " tok/s" in figures


@pytest.mark.slow
def test_generate_answers_a_chat_and_stops_at_a_stop_string():
    options = ["--chat", "--temperature", "0", "--max-tokens", "40", "--stop", "France"]
    done = run_script("generate", "smollm2", "What is the capital of France?", *options, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "France" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_serve_announces_its_address_and_stops_cleanly(stop_signal):
    command = [OCTAVO, "serve", "smollm2", "--port", "0", "--served-model-name", "my/model", *SMALL]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "http://" in line)
        url = next(word for word in line.split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            assert http.get("models").json()["data"][0]["id"] == "my/model"
            body = {"model": "my/model", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            assert "Paris" in http.post("completions", json=body).json()["choices"][0]["text"]
            endless = body | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
            with http.stream("POST", "completions", json=endless) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data:")
                start = time.monotonic()
                process.send_signal(stop_signal)
                *_, last = (line for line in lines if line)
                assert "shut down" in json.loads(last.removeprefix("data:"))["error"]["message"]
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in rest
        assert time.monotonic() - start < 30
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_importing_the_command_line_starts_nothing():
    code = "import octavo.serve.cli, jax._src.xla_bridge as b; assert not b._backends"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
