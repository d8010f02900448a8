"""Prompt logprobs are right on a prefix hit too, and echo puts the prompt before the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import httpx
import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, SamplingParams
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.outputs import Logprobs

from .conftest import MODEL, serve_in_thread
from .tiny import assert_logprob, next_tokens, tiny_engine


@pytest.fixture(scope="module")
def reference(tiny: LoadedModel):
    return next_tokens(tiny)


def new_engine(tiny: LoadedModel, **config) -> Engine:
    return tiny_engine(tiny, max_num_seqs=4, max_num_batched_tokens=36, **config)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return new_engine(tiny)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def asking(num_top: int, **params) -> SamplingParams:
    base = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": num_top}
    return SamplingParams(**(base | params))


def assert_right(
    entries: Sequence[Logprobs | None] | None, tokens: list[int], num_top: int, reference
) -> None:
    assert entries is not None and len(entries) == len(tokens) and entries[0] is None
    rows = reference(tokens)
    for row, token, entry in zip(rows[:-1], tokens[1:], entries[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token
        top = np.argsort(-row, kind="stable")[:num_top].tolist()
        assert entry.keys() == {token, *top}
        for other, found in entry.items():
            assert_logprob(row, other, found)


@pytest.mark.slow
def test_prompt_logprobs_are_right_cold_cached_chunked_and_in_company(
    tiny: LoadedModel, reference
) -> None:
    engine = new_engine(tiny)
    prompts = [prompt(1, 100), [*prompt(1, 60), *prompt(2, 30)], prompt(3, 1), prompt(4, 40)]
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    params = [asking(3), asking(0, logprobs=2), asking(5), plain]
    want = [new_engine(tiny).generate(p, plain)[0].token_ids for p in prompts]
    for _ in range(2):  # the second time everything is in the cache
        answers = engine.generate(prompts, params)
        assert [answer.token_ids for answer in answers] == want
        assert [answer.num_cached_tokens for answer in answers[:3]] == [0, 0, 0]
        for tokens, own, answer in zip(prompts, params, answers, strict=True):
            if own.prompt_logprobs is None:
                assert answer.prompt_logprobs is None
            else:
                assert_right(answer.prompt_logprobs, tokens, own.prompt_logprobs, reference)
    assert answers[3].num_cached_tokens == 39
    # What they computed is shared like anything else, and they looked nothing up.
    assert engine.generate(prompts[0], plain)[0].num_cached_tokens == 99
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (40 + 40 + 100, 39 + 99)
    assert stats.num_active_blocks == 0
    engine.check_invariants()


def test_nobody_waits_for_blocks_that_it_will_not_read(engine: Engine) -> None:
    leader = engine.add_request(prompt(5, 120), SamplingParams(temperature=0, max_tokens=1))
    follower = engine.add_request(prompt(5, 110), asking(1, max_tokens=1))
    engine.step()
    assert engine.stats().num_running == 2
    for request_id in (leader, follower):
        engine.cancel(request_id)


@pytest.mark.slow
def test_a_preempted_request_finds_out_everything(tiny: LoadedModel, reference) -> None:
    engine = new_engine(tiny, num_blocks=25)
    prompts = [prompt(10 + i, 40 + 20 * i) for i in range(4)]
    answers = engine.generate(prompts, asking(2, max_tokens=50))
    assert engine.stats().num_preemptions > 0
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_right(answer.prompt_logprobs, tokens, 2, reference)
    engine.check_invariants()


def test_a_prompt_interrupted_halfway_is_computed_again(
    tiny: LoadedModel, engine: Engine, reference
) -> None:
    tokens = prompt(20, 100)
    request_id = engine.add_request(tokens, asking(2))
    engine.step()
    engine._preempt(engine._requests[request_id])
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert len(found) == 1
    assert_right(found[0], tokens, 2, reference)


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    for served in serve_in_thread(AsyncEngine(engine)):
        with httpx.Client(base_url=f"{served.url}/v1", timeout=120, trust_env=False) as client:
            yield client


TEXT = "Hi 🙂 <|im_end|> there"


def complete(http: httpx.Client, **fields) -> dict:
    body = {"model": MODEL, "prompt": TEXT, "temperature": 0, "max_tokens": 5} | fields
    response = http.post("/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_echo_puts_the_prompt_before_every_answer(http: httpx.Client, tiny: LoadedModel) -> None:
    texts = [choice["text"] for choice in complete(http, n=2, seed=1, temperature=1.0)["choices"]]
    echoed = complete(http, n=2, seed=1, temperature=1.0, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == [TEXT + text for text in texts]
    ids = tiny.tokenizer.encode("One two")
    both = complete(http, prompt=[ids, [5, 6]], echo=True)["choices"]
    assert both[0]["text"].startswith("One two")
    assert both[1]["text"].startswith(tiny.tokenizer.decode([5, 6]))


def test_echo_with_logprobs_reports_on_the_prompt_too(http: httpx.Client, tiny, reference) -> None:
    ids = tiny.tokenizer.encode(TEXT)
    rows = reference(ids)
    complete(http)  # from now on it is cached
    choice = complete(http, echo=True, logprobs=2)["choices"][0]
    found, count = choice["logprobs"], len(ids)
    assert len(found["tokens"]) == count + 5
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    want = [rows[i, token] for i, token in enumerate(ids[1:])]
    assert found["token_logprobs"][1:count] == pytest.approx(want, abs=2e-4)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert "<|im_end|>" in found["tokens"]
    streamed: dict[str, list] = {}
    body = {"model": MODEL, "prompt": TEXT, "temperature": 0, "max_tokens": 5, "stream": True}
    text = ""
    with http.stream("POST", "/completions", json=body | {"echo": True, "logprobs": 2}) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                (piece,) = httpx.Response(200, text=line[6:]).json()["choices"]
                text += piece["text"]
                for key, values in piece["logprobs"].items():
                    streamed.setdefault(key, []).extend(values)
    assert text == choice["text"]
    assert streamed["text_offset"] == found["text_offset"]
    assert streamed["tokens"] == found["tokens"]


def test_a_text_is_scored_by_echo_without_further_tokens(http: httpx.Client, tiny) -> None:
    count = len(tiny.tokenizer.encode(TEXT))
    scored = complete(http, echo=True, logprobs=1, max_tokens=0, n=2, best_of=3, temperature=1.0)
    wanted = complete(http, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert [choice["finish_reason"] for choice in scored["choices"]] == ["length"] * 2
    for choice in scored["choices"]:
        assert choice["text"] == TEXT
        assert choice["logprobs"] == {key: values[:count] for key, values in wanted.items()}
    usage = scored["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 0)
    # Whatever would end it at once is not heeded, and a stream says the same.
    options = {"include_usage": True}
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    events = http.post("/completions", json=body | {"stream": True, "stream_options": options}).text
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    (piece,) = [choice for piece in pieces for choice in piece["choices"]]
    assert (piece["text"], piece["finish_reason"]) == (TEXT, "length")
    assert piece["logprobs"] == scored["choices"][0]["logprobs"]
    assert pieces[-1]["usage"]["completion_tokens"] == 0
    assert complete(http, echo=True, max_tokens=0)["choices"][0]["logprobs"] is None
    for bad in ({"max_tokens": 0}, {"echo": True, "max_tokens": 0, "use_beam_search": True}):
        assert http.post("/completions", json=body | {"echo": False} | bad).status_code == 400


def test_prompt_logprobs_come_in_vllms_form(http: httpx.Client, tiny, reference) -> None:
    ids = tiny.tokenizer.encode(TEXT)
    (choice,) = complete(http, prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    for row, token, entry in zip(
        reference(ids), ids[1:], choice["prompt_logprobs"][1:], strict=False
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(row[token], abs=2e-4)
        assert entry[str(int(row.argmax()))]["rank"] == 1
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "prompt_logprobs": 0}
    answer = http.post("/chat/completions", json=body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in complete(http)["choices"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 21},
        {"prompt_logprobs": 1, "stream": True},
        {"prompt_logprobs": 1, "echo": True, "logprobs": 1},
    ],
)
def test_what_cannot_be_reported_is_refused(http: httpx.Client, fields: dict) -> None:
    body = {"model": MODEL, "prompt": "Hi"} | fields
    response = http.post("/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"
    bad = http.post("/completions", json=body | {"prompt": [10**9], "echo": True})
    assert bad.status_code == 400
