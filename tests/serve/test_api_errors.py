"""Whatever is sent, the answer names the field at fault, and the server lives on."""

import json
import socket
from urllib.parse import urlsplit

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HUGE = 10**30

# (fields beside model and prompt, the field at fault)
BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "a\0b"}, "prompt"),
    ({"prompt": "half \ud800"}, "prompt"),
    ({"prompt": "long " * 20_000}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -float("inf")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": HUGE}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": HUGE}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": HUGE}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1 << 31]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"user": 1}, "user"),
    ({"echo": 1}, "echo"),
    ({"best_of": 129}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "best_of": 2}, "best_of"),
    ({"use_beam_search": True, "seed": 1}, "seed"),
    ({"use_beam_search": True, "n": 5}, "n"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
    ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"unheard_of": None}, "unheard_of"),
]

USER = {"role": "user", "content": "Hi"}

# (fields beside model and messages, the field at fault)
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [USER, {"role": "wizard", "content": "Hi"}]}, "messages.1.role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\0"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
    ),
    ({"messages": [USER | {"name": "Ann"}]}, "messages.0.name"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [USER | {"mood": "good"}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": "long " * 20_000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prompt": "Hi"}, "prompt"),
]

NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": None,
    "n": None,
    "seed": None,
    "stop": None,
    "stream": None,
    "stream_options": None,
    "user": "ann",
    "temperature": None,
    "top_p": None,
}
NEUTRAL |= {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
NEUTRAL_COMPLETION = NEUTRAL | {"best_of": 1, "echo": False, "suffix": None}
NEUTRAL_CHAT = NEUTRAL | {
    "logprobs": False,
    "tools": [],
    "tool_choice": None,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
}


@pytest.fixture(autouse=True)
def lives_on(http):
    """After every test the server is healthy and takes a request."""
    yield
    assert http.get("/health").status_code == 200
    assert post(http, COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}).status_code == 200


def post(http, path, fields):
    default = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [USER]}
    body = json.dumps({"model": "smollm2"} | default | fields)
    return http.post(path, content=body, headers={"Content-Type": "application/json"})


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"] and len(error["message"]) < 600
    return error


def label(value):
    return value if isinstance(value, str) else json.dumps(value)[:40]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=label)
def test_a_bad_completion_request_is_refused_by_the_fields_name(http, fields, param):
    error = error_of(post(http, COMPLETIONS, fields), 400)
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"] or param.split(".")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=label)
def test_a_bad_chat_request_is_refused_by_the_fields_name(http, fields, param):
    assert error_of(post(http, CHAT, fields), 400)["param"] == param


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(http, field):
    body = {"model": "smollm2", "prompt": "Hi"}
    del body[field]
    assert error_of(http.post(COMPLETIONS, json=body), 400)["param"] == field


def test_a_streamed_request_is_refused_before_the_stream_begins(http):
    response = post(http, COMPLETIONS, {"stream": True, "max_tokens": 10**6})
    assert error_of(response, 400)["param"] == "max_tokens"


def test_a_batch_is_refused_as_a_whole(http, server):
    before = server.stats()
    response = post(http, COMPLETIONS, {"prompt": [[1, 2, 3], [10**6]]})
    assert error_of(response, 400)["param"] == "prompt"
    after = server.wait_until(lambda stats: stats.num_running + stats.num_waiting == 0)
    assert after.generated_tokens == before.generated_tokens


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model": "smollm2", "prompt": "Hi"',
        b'{"model": "smollm2", "prompt": "\xff"}',
        b'{"model": "smollm2", "prompt": "Hi", "n": ' + b"1" * 5000 + b"}",
        b'{"model": "smollm2", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=["empty", "null", "array", "text", "open", "cut", "utf8", "digits", "deep", "deeper"],
)
def test_a_body_that_is_no_json_object_is_refused(http, body):
    headers = {"Content-Type": "application/json"}
    error = error_of(http.post(COMPLETIONS, content=body, headers=headers), 400)
    assert "body" in error["message"]


@pytest.mark.parametrize("nested", [900 * [0], None], ids=["wide", "deep"])
def test_a_nested_value_is_refused_by_its_fields_name(http, nested):
    depth = b"[" * 500 + b"]" * 500
    value = depth if nested is None else json.dumps([nested]).encode()
    body = b'{"model": "smollm2", "prompt": "Hi", "temperature": ' + value + b"}"
    headers = {"Content-Type": "application/json"}
    error = error_of(http.post(COMPLETIONS, content=body, headers=headers), 400)
    assert error["param"] == "temperature"


def test_json_must_be_announced_as_json(http):
    # Else any page in a browser could post to a server on the same machine unasked.
    body = json.dumps({"model": "smollm2", "prompt": "Hi"})
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(response, 400)["message"]


def test_another_model_is_not_found(http):
    for path in (COMPLETIONS, CHAT):
        error = error_of(post(http, path, {"model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error_of(http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_same_shape(http):
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    response = http.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_an_announced_huge_body_is_not_even_read(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"Content-Length: {10**12}\r\n\r\n".encode()
        )
        assert b" 413 " in sock.recv(4096).split(b"\r\n")[0]


def test_a_huge_body_of_unknown_length_is_cut_off(server):
    address = urlsplit(server.url)
    chunk = b"x" * 2**16
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        sent = 0
        try:
            while sent < 64 * 2**20:
                sock.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                sent += len(chunk)
        except OSError:
            pass  # the server has hung up, as it should
    assert 16 * 2**20 <= sent < 64 * 2**20


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, NEUTRAL_COMPLETION), (CHAT, NEUTRAL_CHAT)]
)
def test_values_that_ask_for_nothing_are_accepted(http, path, fields):
    response = post(http, path, fields | {"max_tokens": 1})
    assert response.status_code == 200, response.text
