"""Texts have the form that is asked for, every time, even if the model knows nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jax.numpy as jnp
import jsonschema
import numpy as np
import openai
import pytest

from octavo.models import LoadedModel
from octavo.serve import (
    Completion,
    Engine,
    InvalidRequest,
    SamplingParams,
    StructuredOutputs,
    grammars,
)
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.grammars import Grammars
from octavo.serve.token_masks import TokenMasks, mask_logits

from .conftest import MODEL, Served, serve_in_thread
from .tiny import tiny_engine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "spouse": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "spouse"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
]


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel) -> Engine:
    return tiny_engine(tiny, max_num_seqs=4, max_num_batched_tokens=32)


def asking(form: dict, seed: int = 0, **params) -> SamplingParams:
    base = {"temperature": 1.0, "seed": seed, "max_tokens": 200}
    return SamplingParams(structured_outputs=StructuredOutputs(**form), **(base | params))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def assert_valid(answer: Completion, schema: dict) -> None:
    assert answer.finish_reason == "stop", answer
    jsonschema.validate(json.loads(answer.text), schema)


def test_random_weights_at_temperature_one_keep_to_every_schema(engine: Engine) -> None:
    wanted = [SCHEMAS[i % len(SCHEMAS)] for i in range(12)]
    params = [asking({"json": schema}, seed=i) for i, schema in enumerate(wanted)]
    prompts = [prompt(i, 4 + 3 * i) for i in range(len(wanted))]
    answers = engine.generate(prompts, params)
    for answer, schema in zip(answers, wanted, strict=True):
        assert_valid(answer, schema)
    assert len({answer.text for answer in answers}) > 6
    assert engine.stats().num_active_blocks == 0


def test_regular_expressions_choices_and_grammars_are_kept_to(engine: Engine) -> None:
    forms = [
        {"regex": "(ab|cd){2,5}[0-9]+é"},
        {"choice": ("ja", "nein", 'viel"leicht', "ja, weiß nicht")},
        {"grammar": 'root ::= "<" [a-c]+ ">"'},
        {"grammar": 'start: "x" start "y" | "z"'},
        {"json_object": True},
    ]
    params = [asking(form, seed, max_tokens=60) for seed in range(3) for form in forms]
    answers = engine.generate([prompt(i, 9) for i in range(len(params))], params)
    for own, answer in zip(params, answers, strict=True):
        form = own.structured_outputs
        assert form is not None
        patterns = {
            "regex": form.regex,
            "choice": "|".join(map(re.escape, form.choice or ())),
            "grammar": r"<[a-c]+>|x*zy*",
        }
        if answer.finish_reason == "length":  # a beginning, and these have no end that must come
            assert form.choice is None
        elif form.json_object:
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert re.fullmatch(patterns[form.kind], answer.text), answer.text
    assert sum(answer.finish_reason == "stop" for answer in answers) > len(answers) / 2


@pytest.mark.slow
def test_a_seed_gives_the_same_text_in_any_batch_and_pool(tiny: LoadedModel, engine) -> None:
    params = [
        asking({"json": PERSON}, 1, max_tokens=100),
        SamplingParams(temperature=1.0, seed=2, max_tokens=60, ignore_eos=True),
        asking(
            {"json": PERSON},
            3,
            max_tokens=90,
            frequency_penalty=0.5,
            logit_bias={5: -3.0},
            logprobs=1,
        ),
        asking({"regex": "[a-f ]{40}"}, 4, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    ]
    prompts = [prompt(40 + i, 30 + 9 * i) for i in range(len(params))]
    alone = [engine.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
    for at in (0, 2):
        assert_valid(alone[at], PERSON)
    assert re.fullmatch("[a-f ]{40}", alone[3].text) and alone[3].finish_reason == "stop"
    want = [answer.token_ids for answer in alone]
    assert [answer.token_ids for answer in engine.generate(prompts, params)] == want
    tight = tiny_engine(tiny, num_blocks=25, max_num_seqs=4, max_num_batched_tokens=32)
    assert [answer.token_ids for answer in tight.generate(prompts, params)] == want
    assert tight.stats().num_preemptions > 0
    guessing = tiny_engine(
        tiny, num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=32
    )
    repeating = [[7, 8, 9] * 10 for _ in range(2)]
    own = [asking({"regex": "[ab]{30}"}, seed) for seed in range(2)]
    assert [answer.token_ids for answer in guessing.generate(repeating, own)] == [
        engine.generate(p, o)[0].token_ids for p, o in zip(repeating, own, strict=True)
    ]


def test_a_grammar_that_takes_long_keeps_nobody_waiting_but_for_itself(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, compiled = Grammars(), []
    begun, go_on = threading.Event(), threading.Event()
    compile_fn = grammars._compile

    def slow(tokenizer: Any, wanted: StructuredOutputs) -> Any:
        compiled.append(wanted.source)
        if wanted.source == "slow":
            begun.set()
            assert go_on.wait(60)
        return compile_fn(tokenizer, wanted)

    monkeypatch.setattr(grammars, "_compile", slow)
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = [
                pool.submit(kept.start, tiny, StructuredOutputs(regex="slow")) for _ in range(2)
            ]
            assert begun.wait(60)
            assert not kept.start(tiny, StructuredOutputs(regex="fast")).finished
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        for one in waiting:
            assert not one.result().finished
    assert compiled == ["slow", "fast"]


def test_a_text_cut_short_is_the_beginning_of_one(engine: Engine) -> None:
    (answer,) = engine.generate(prompt(1, 9), asking({"json": PERSON}, max_tokens=3))
    assert answer.finish_reason == "length" and answer.text.startswith('{"')


def test_masks_forbid_what_is_not_set_and_leave_other_rows_alone() -> None:
    vocab = 70
    rng = np.random.default_rng(0)
    allowed = rng.random((3, vocab)) < 0.3
    padded = np.pad(allowed, ((0, 0), (0, 96 - vocab)))
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    masks = TokenMasks(constrained=np.array([True, False, True]), bits=bits)
    got = np.asarray(mask_logits(jnp.asarray(logits), masks))
    want = np.where(allowed | np.array([[False], [True], [False]]), logits, -np.inf)
    np.testing.assert_array_equal(got, want)


def test_what_cannot_be_followed_any_more_ends_as_cancelled(engine: Engine) -> None:
    request_id = engine.add_request(prompt(2, 9), asking({"json": PERSON}))
    grammar = engine._requests[request_id].grammar
    assert grammar is not None
    assert not grammar.accept(5)  # no JSON begins so: now it is lost
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    assert outputs[-1].finish_reason == "cancelled"
    assert engine.stats().num_active_blocks == 0


def test_the_librarys_tokens_have_our_bytes(tiny: LoadedModel) -> None:
    from octavo.serve.grammars import _tokenizer_of

    theirs, ours = _tokenizer_of(tiny), tiny.tokenizer
    assert theirs.vocab_size == tiny.config.vocab_size
    for i in range(ours.vocab_size):
        assert theirs.is_special_token(i) == (i in ours.special_ids)
        if i not in ours.special_ids:
            assert theirs.decode_bytes([i]) == ours.token_bytes(i)


BAD_FORMS = [
    {},
    {"regex": "a", "json_object": True},
    {"regex": ""},
    {"choice": ()},
    {"choice": ("a", "")},
    {"choice": ["a"]},
    {"json": 5},
    {"json": {"default": {1, 2}}},
]


@pytest.mark.parametrize("form", BAD_FORMS, ids=str)
def test_a_form_must_be_one_and_whole(form: dict) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**form)
    assert caught.value.param == "structured_outputs"


UNUSABLE = [
    {"regex": "[ab"},
    {"grammar": "start: nothing"},
    {"grammar": "root ::= ("},
    {"json": "{"},
    {"json": "[]"},
    {"json": {"type": "wizard"}},
    {"json": {"type": "string", "not": {"const": "a"}}},
    {"json": {"$ref": "https://example.com/schema.json"}},
]


@pytest.mark.parametrize("form", UNUSABLE, ids=str)
def test_what_cannot_be_compiled_is_refused_and_says_so(engine: Engine, form: dict) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used") as caught:
        engine.add_request([1], asking(form))
    assert caught.value.param == "structured_outputs"
    assert engine.num_unfinished == 0
    with pytest.raises(InvalidRequest) as caught:
        asking({"regex": "a"}, min_tokens=3)
    assert caught.value.param == "min_tokens"


def test_without_the_library_the_error_says_what_to_install(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match="pip install 'octavo"):
        Grammars().start(tiny, StructuredOutputs(regex="a"))


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    yield from serve_in_thread(AsyncEngine(engine))


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{served.url}/v1", timeout=120, trust_env=False) as client:
        yield client


MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(http: httpx.Client, **fields) -> httpx.Response:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1} | fields
    return http.post("/chat/completions", json=body)


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_openais_client_gets_what_its_response_format_says(served: Served) -> None:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1}
        form: Any = schema_format(PERSON)
        (choice,) = client.chat.completions.create(**asked, response_format=form).choices
        stream = client.chat.completions.create(**asked, response_format=form, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert text == choice.message.content and choice.finish_reason == "stop"


FORMS = [
    ({"structured_outputs": {"json": PERSON}}, None),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'root ::= "p" | "q"'}}, "[pq]"),
    ({"guided_json": json.dumps(PERSON)}, None),
    ({"guided_regex": "[cd]{4}"}, "[cd]{4}"),
    ({"guided_choice": ["one", "two"]}, "one|two"),
    ({"guided_grammar": 'root ::= "r" | "s"'}, "[rs]"),
]


def test_every_way_to_ask_for_a_form_works_in_both_apis(http: httpx.Client) -> None:
    for fields, pattern in FORMS:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "seed": 3, "n": 2} | fields
        texts = [c["text"] for c in http.post("/completions", json=body).json()["choices"]]
        answer = chat(http, **fields).json()
        for text in [*texts, answer["choices"][0]["message"]["content"]]:
            if pattern is None:
                jsonschema.validate(json.loads(text), PERSON)
            else:
                assert re.fullmatch(pattern, text), (fields, text)


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema_format({"type": "wizard"})}, "response_format"),
    ({"response_format": schema_format(5)}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_a_bad_form_is_refused_by_the_fields_name(http, fields: dict, param: str) -> None:
    response = chat(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and len(error["message"]) < 600, error


def test_plain_text_may_be_asked_for_by_name(http: httpx.Client) -> None:
    assert chat(http, response_format={"type": "text"}, max_tokens=3).status_code == 200
