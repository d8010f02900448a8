"""`--pin-file`: prompts that are computed and pinned before the server takes requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer

from octavo.models import LoadedModel
from octavo.serve import Engine, SamplingParams
from octavo.serve.chat_ids import chat_ids
from octavo.serve.pin_file import compute_and_pin, read_pins

from .tiny import tiny_engine, tiny_model

SYSTEM = [{"role": "system", "content": "You answer in one word. " * 8}]
TEXT = "The library opened at nine, and every table near the windows was taken. "
ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(smollm2: LoadedModel) -> Engine:
    return tiny_engine(tiny_model(smollm2), num_blocks=64, max_model_len=256)


def written(folder: Path, *lines: object) -> Path:
    path = folder / "pins.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def flood(engine: Engine) -> None:
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(0, 49152, 240).tolist()
        engine.generate([tokens], ONE)


def cached(engine: Engine, prompt: str | list[int], salt: str = "") -> int:
    (answer,) = engine.collect([engine.add_request(prompt, ONE, cache_salt=salt)])
    return answer.num_cached_tokens


@pytest.mark.slow
def test_pinned_prompts_are_cached_before_anybody_asks_and_stay(engine: Engine, tmp_path: Path):
    ids = list(range(100, 140))
    path = written(
        tmp_path, {"messages": SYSTEM}, "", {"prompt": TEXT, "cache_salt": "a"}, {"prompt": ids}
    )
    shown = []
    compute_and_pin(engine, path, read_pins(path), lambda *args: shown.append(args[:2]))
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]
    flood(engine)
    chat = chat_ids(engine.loaded, [*SYSTEM, {"role": "user", "content": "What is blue?"}])
    system = chat_ids(engine.loaded, SYSTEM)
    same = next(i for i, (a, b) in enumerate(zip(chat, system, strict=False)) if a != b)
    assert cached(engine, chat) >= same // 8 * 8 > 16
    assert cached(engine, TEXT, "a") > 8 and cached(engine, TEXT) == 0
    assert cached(engine, [*ids, 5, 6]) >= 40
    engine.reset_cache()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Invalid JSON"),
        ({"prompt": "a", "messages": SYSTEM}, "line 2: .*give one prompt"),
        ({}, "line 2: .*give one prompt"),
        ({"prompt": "a", "ttl": 5}, "line 2: .*ttl"),
        ({"prompt": ["a", "b"]}, "line 2: .*give one prompt"),
    ],
)
def test_a_line_that_is_not_understood_is_named(tmp_path: Path, line: object, words: str, capsys):
    with pytest.raises(typer.Exit) as caught:
        read_pins(written(tmp_path, {"prompt": "good"}, line))
    assert caught.value.exit_code == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": list(range(300))}, "line 2: the prompt has 300 tokens"),
        ({"prompt": "a", "adapter": "none"}, "line 2: .*none"),
        ({"prompt": TEXT, "ttl_seconds": -1}, "line 2: ttl_seconds=-1"),
        ({"prompt": list(range(255))}, "line 2: .*would be pinned"),
    ],
)
def test_a_prompt_that_cannot_be_pinned_is_named(
    engine: Engine, tmp_path: Path, line: object, words: str, capsys
):
    path = written(tmp_path, {"prompt": list(range(50, 80))}, line)
    with pytest.raises(typer.Exit) as caught:
        compute_and_pin(engine, path, read_pins(path), lambda *args: None)
    assert caught.value.exit_code == 1
    assert re.search(words, capsys.readouterr().err)
    engine.reset_cache()
    assert engine.stats().num_active_blocks == 0


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, capsys):
    path = tmp_path / "pins"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(typer.Exit):
        read_pins(path)
    assert str(path) in capsys.readouterr().err
