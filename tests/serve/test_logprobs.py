"""Logprobs are the model's own, in any batch, whatever a request asks for beside them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, SamplingParams
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.logprob_bodies import ChatLogprobs, CompletionLogprobs
from octavo.serve.outputs import Logprob

from .conftest import MODEL, Served, serve_in_thread
from .tiny import assert_logprob, next_tokens, tiny_engine


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def reference(tiny: LoadedModel):
    return next_tokens(tiny)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


ASKED = [
    {"logprobs": 0, "temperature": 0},
    {"logprobs": 20, "temperature": 1.0, "seed": 1},
    {"temperature": 0},
    {"logprobs": 5, "temperature": 0.7, "seed": 2, "frequency_penalty": 2.0, "top_k": 50},
    {"logprobs": 3, "temperature": 0, "logit_bias": {77: 100}, "min_tokens": 5},
]


def test_logprobs_are_those_of_the_models_own_distribution(engine: Engine, reference) -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **own) for own in ASKED]
    prompts = [prompt(i, 10 + 11 * i) for i in range(len(ASKED))]
    for answers in (
        engine.generate(prompts, params),
        [engine.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)],  # hits
    ):
        for tokens, own, answer in zip(prompts, params, answers, strict=True):
            if own.logprobs is None:
                assert answer.logprobs is None
                continue
            assert answer.logprobs is not None and len(answer.logprobs) == 20
            want = reference([*tokens, *answer.token_ids])[len(tokens) - 1 : -1]
            for row, token, entry in zip(want, answer.token_ids, answer.logprobs, strict=True):
                assert next(iter(entry)) == token
                top = np.argsort(-row, kind="stable")[: own.logprobs].tolist()
                assert entry.keys() == {token, *top}
                for other, found in entry.items():
                    assert_logprob(row, other, found)


def test_bytes_of_tokens_are_the_text(smollm2: LoadedModel) -> None:
    text = "Ünïcödé — 🙂👍🏽 naïve\n\tcafé 漢字 <|im_end|>" + "".join(map(chr, range(32, 256)))
    ids = smollm2.tokenizer.encode(text)
    pieces = [smollm2.tokenizer.token_bytes(i) for i in ids]
    assert b"".join(pieces).decode() == smollm2.tokenizer.decode(ids, skip_special_tokens=False)
    assert b"<|im_end|>" in pieces
    with pytest.raises(UnicodeDecodeError):  # or this text has no token that is part of a character
        [piece.decode() for piece in pieces]


def test_parts_of_characters_keep_their_bytes_and_offsets(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    text = "Hi 🙂👍🏽 café!"
    ids = tokenizer.encode(text)
    entries = [{i: Logprob(logprob=-1.5, rank=2), 5: Logprob(logprob=-0.5, rank=1)} for i in ids]
    chat = ChatLogprobs(tokenizer, 1).body(ids, entries)["content"]
    assert b"".join(bytes(token["bytes"]) for token in chat).decode() == text
    assert all(token["token"] == bytes(token["bytes"]).decode(errors="replace") for token in chat)
    assert all([top["logprob"] for top in token["top_logprobs"]] == [-0.5] for token in chat)

    writer, pieces = CompletionLogprobs(tokenizer, 1), []
    for i, entry in zip(ids, entries, strict=True):  # one at a time, as a stream does
        pieces.append(writer.body([i], [entry]))
    whole = CompletionLogprobs(tokenizer, 1).body(ids, entries)
    assert {key: [x for piece in pieces for x in piece[key]] for key in whole} == whole
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert text[offset:].startswith(token) or token.startswith("bytes:\\x")
    assert any(token.startswith("bytes:\\xf0") for token in whole["tokens"])


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    yield from serve_in_thread(AsyncEngine(engine))


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


SAMPLED = {"model": MODEL, "max_tokens": 12, "temperature": 1.0, "seed": 5}


def test_completions_report_logprobs_whole_and_streamed(client, engine, tiny) -> None:
    asked = SAMPLED | {"prompt": "The capital", "logprobs": 3, "n": 2}
    answer = client.completions.create(**asked)
    streamed: list[dict[str, list]] = [{}, {}]
    for chunk in client.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        for key, values in choice.logprobs.model_dump().items():
            streamed[choice.index].setdefault(key, []).extend(values)
    for choice in answer.choices:
        found, pieces = choice.logprobs, streamed[choice.index]
        assert (found.tokens, found.text_offset) == (pieces["tokens"], pieces["text_offset"])
        assert found.token_logprobs == pytest.approx(pieces["token_logprobs"], abs=1e-4)
        for one, other in zip(found.top_logprobs, pieces["top_logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert len(found.tokens) == 12 and found.text_offset[0] == 0
        for token, own, top in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert top[token] == own and 3 <= len(top) <= 4
            assert own <= max(top.values()) < 0
    plain = client.completions.create(**(asked | {"logprobs": None}))
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].text == answer.choices[0].text


def test_chats_report_logprobs_whole_and_streamed(client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked = SAMPLED | {"messages": messages, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(**asked).choices
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (piece,) = chunk.choices
        streamed += piece.logprobs.content if piece.logprobs else []
    assert len(streamed) == 12
    for one, other in zip(streamed, choice.logprobs.content, strict=True):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]
    raw = b"".join(bytes(token.bytes) for token in streamed)
    assert raw.decode(errors="replace") == choice.message.content
    for token in streamed:
        assert len(token.top_logprobs) == 2
        first, second = token.top_logprobs
        assert first.logprob >= max(second.logprob, token.logprob)
    none = client.chat.completions.create(**(asked | {"top_logprobs": None})).choices[0]
    assert [token.top_logprobs for token in none.logprobs.content] == [[]] * 12


def test_penalties_and_bias_come_through_the_api(client, engine: Engine) -> None:
    def ids(**fields) -> list[str]:
        asked = SAMPLED | {"temperature": 0, "prompt": [5, 6], "logprobs": 0}
        extra = {k: fields.pop(k) for k in ("min_tokens", "repetition_penalty") if k in fields}
        return (
            client.completions.create(**asked, **fields, extra_body=extra)
            .choices[0]
            .logprobs.tokens
        )

    bias = {"1000": 50, "2000": 45}
    a, b = (engine.loaded.tokenizer.token_bytes(i).decode() for i in (1000, 2000))
    assert ids(logit_bias=bias) == [a] * 12
    assert ids(logit_bias=bias, frequency_penalty=2.0)[:4] == [a, a, a, b]
    assert ids(logit_bias={"1000": 50, "2000": 49}, presence_penalty=2.0)[:2] == [a, b]
    assert ids(logit_bias=bias, repetition_penalty=2.0)[:2] == [a, b]
    end = str(engine.loaded.eos_token_ids[0])
    assert len(ids(logit_bias={end: 100})) == 1
    assert len(ids(logit_bias={end: 100}, min_tokens=4)) == 5


BAD = [
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"05": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": "1"}}, "logit_bias"),
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("completions", {"logit_bias": {"49152": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("completions", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ("completions", {"logit_bias": [1]}, "logit_bias"),
    ("completions", {"presence_penalty": 3}, "presence_penalty"),
    ("completions", {"frequency_penalty": False}, "frequency_penalty"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
    ("completions", {"min_tokens": -1}, "min_tokens"),
    ("completions", {"min_tokens": 17}, "min_tokens"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"logprobs": 5}, "logprobs"),
]


def test_bad_values_are_refused_by_the_fields_name(served: Served) -> None:
    base = {
        "completions": {"prompt": "Hi"},
        "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    with httpx.Client(base_url=f"{served.url}/v1/", timeout=60, trust_env=False) as http:
        for path, fields, param in BAD:
            response = http.post(path, json={"model": MODEL} | base[path] | fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param and len(error["message"]) < 600, error
