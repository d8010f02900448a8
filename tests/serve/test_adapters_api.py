"""Adapters over HTTP: chosen by `model`, listed, and loaded from one folder if that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.models import LoadedModel, save_adapter
from octavo.serve import Engine, cli
from octavo.serve.async_engine import AsyncEngine

from .conftest import MODEL, serve_in_thread
from .test_cli import run
from .tiny import SLOTS, lora_engine, tiny_adapter

PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def folder(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on disk; those named so lie outside of the folder that the server allows."""
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("allowed/one", "allowed/two", "outside")):
        save_adapter(tiny_adapter(tiny.config, i), root / name)
    save_adapter(tiny_adapter(tiny.config, 9, rank=8), root / "allowed" / "large")
    (root / "allowed" / "link").symlink_to(root / "outside")
    return root


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel, folder: Path) -> Engine:
    engine = lora_engine(tiny)
    engine.load_adapter("first", folder / "allowed" / "one")
    return engine


@pytest.fixture(scope="module")
def http(engine: Engine, folder: Path) -> Iterator[httpx.Client]:
    for served in serve_in_thread(AsyncEngine(engine), adapter_dir=folder / "allowed"):
        with httpx.Client(base_url=f"{served.url}/v1", timeout=120, trust_env=False) as client:
            yield client


def complete(http: httpx.Client, model: str) -> tuple[str, int]:
    """The greedy text, and the cached tokens of the prompt."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    answer = http.post("completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["text"], usage["cached_tokens"]


def names(http: httpx.Client) -> list[str]:
    return [card["id"] for card in http.get("models").json()["data"]]


@pytest.mark.slow
def test_the_model_field_chooses_the_adapter(http: httpx.Client) -> None:
    assert names(http) == [MODEL, "first"]
    assert http.get("models/first").json()["parent"] == MODEL
    (plain, _), (adapted, cached) = complete(http, MODEL), complete(http, "first")
    assert plain != adapted and cached == 0
    assert complete(http, "first") == (adapted, 39)
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
    said = [
        http.post("chat/completions", json=chat | {"model": model}).json()["choices"][0]["message"]
        for model in (MODEL, "first")
    ]
    assert said[0] != said[1]
    nobody = http.post("completions", json={"model": "second", "prompt": "x"})
    assert nobody.status_code == 404 and nobody.json()["error"]["code"] == "model_not_found"
    assert "'smollm2', 'first'" in nobody.json()["error"]["message"]


def test_adapters_are_loaded_replaced_and_unloaded(http: httpx.Client) -> None:
    def load(**fields: Any) -> httpx.Response:
        return http.post("load_lora_adapter", json=fields)

    assert load(lora_name="mine", lora_path="one").json()["id"] == "mine"
    assert names(http) == [MODEL, "first", "mine"]
    one = complete(http, "mine")[0]
    assert one == complete(http, "first")[0]
    again = load(lora_name="mine", lora_path="two")
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert load(lora_name="mine", lora_path="two", load_inplace=True).status_code == 200
    two, cached = complete(http, "mine")
    assert two != one and cached == 0
    gone = http.post("unload_lora_adapter", json={"lora_name": "mine"})
    assert gone.json() == {"id": "mine", "object": "model", "deleted": True}
    assert names(http) == [MODEL, "first"]
    assert http.post("completions", json={"model": "mine", "prompt": "x"}).status_code == 404
    assert http.post("unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404


REFUSED = {
    "outside": ({"lora_path": "../outside"}, "lora_path", "not inside"),
    "absolute": ({"lora_path": "/etc"}, "lora_path", "not inside"),
    "link": ({"lora_path": "link"}, "lora_path", "not inside"),
    "nothing": ({"lora_path": "three"}, "lora_path", "has no adapter_config.json"),
    "long": ({"lora_path": "x" * 5000}, "lora_path", "name too long"),
    "rank": ({"lora_path": "large"}, "lora_path", "rank 8"),
    "model": ({"lora_name": MODEL}, "lora_name", "the model itself"),
    "empty": ({"lora_name": ""}, "lora_path", "name of an adapter must not be empty"),
    "unknown": ({"lora_paths": "one"}, "lora_paths", "not a field"),
    "unsupported": ({"is_3d_lora_weight": True}, "is_3d_lora_weight", "not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_loaded_is_a_400_that_says_why(http: httpx.Client, what: str) -> None:
    fields, param, words = REFUSED[what]
    body = {"lora_name": "new", "lora_path": "one"} | fields
    answer = http.post("load_lora_adapter", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"].lower()
    assert names(http) == [MODEL, "first"]


def test_without_a_free_slot_loading_is_refused(http: httpx.Client) -> None:
    more = [f"n{i}" for i in range(SLOTS)]
    answers = [
        http.post("load_lora_adapter", json={"lora_name": name, "lora_path": "one"})
        for name in more
    ]
    assert [answer.status_code for answer in answers] == [200] * (SLOTS - 1) + [400]
    assert "slots are taken" in answers[-1].json()["error"]["message"]
    for name in more[:-1]:
        http.post("unload_lora_adapter", json={"lora_name": name})
    assert http.post("unload_lora_adapter", json={"lora_name": MODEL}).status_code == 400


def test_clients_load_nothing_unless_the_server_allows_it() -> None:
    schema = cli.create_app(AsyncEngineStandIn()).openapi()  # pyright: ignore[reportArgumentType]
    assert "/v1/completions" in schema["paths"]
    assert not any("lora" in path for path in schema["paths"])


class AsyncEngineStandIn:
    """As much of an engine as making an application takes."""

    class loaded:
        name = "nobody"


def test_the_command_line_loads_adapters_before_it_serves(
    tiny: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr(cli, "load_model", lambda *_, **__: tiny)
    monkeypatch.setattr(cli, "_run_server", lambda *args: served.append(args))
    monkeypatch.setattr(Engine, "warmup", lambda *_: 0)
    options = ["serve", "tiny", "--port", "0", "--num-blocks", "40", "--compilation-cache-dir", ""]

    def module(name: str, path: str) -> list[str]:
        return ["--lora-modules", f"{name}={folder / path}"]

    allowed = ["--lora-dir", str(folder / "allowed")]
    code, _, error = run(*options, *module("a", "allowed/one"), *module("b", "outside"), *allowed)
    assert code == 0, error
    app, async_engine, *_ = served[0]
    assert async_engine.adapter_names == ("a", "b") and async_engine.config.max_loras == 2
    assert "/v1/load_lora_adapter" in app.openapi()["paths"]
    for arguments, exit_code, words in (
        (module("tiny", "outside"), 2, "the model's own name"),
        (module("a", "outside") * 2, 2, "each name once"),
        (["--lora-modules", "outside"], 2, "expected NAME=PATH"),
        (module("a", "nowhere"), 1, "has no adapter_config.json"),
        ([*module("a", "allowed/large"), "--max-lora-rank", "4"], 1, "max_lora_rank=4"),
        (allowed, 2, "give --max-loras"),
        (["--lora-dir", str(folder / "nowhere")], 2, "does not exist"),
    ):
        code, _, error = run(*options, *arguments)
        assert code == exit_code and words in " ".join(error.split()), error
    assert len(served) == 1


@pytest.mark.slow
def test_the_command_line_generates_with_an_adapter(
    tiny: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "load_model", lambda *_, **__: tiny)
    options = ["generate", "tiny", "one two three", "--temperature", "0", "--max-tokens", "8"]
    options += ["--num-blocks", "40", "--compilation-cache-dir", ""]
    options += ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-loras", "1"]
    path = folder / "allowed/one"
    code, with_adapter, error = run(*options, "--adapter", str(path))
    assert code == 0, error
    code, without, error = run(*options)
    assert code == 0, error
    assert with_adapter != without
    code, _, error = run(*options, "--adapter", str(folder / "nowhere"))
    assert code == 1 and "has no adapter_config.json" in " ".join(error.split())
