"""Over HTTP, around a small model: cache control, priorities, limits, and an end in order."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from octavo.models import LoadedModel
from octavo.serve.api import create_app
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.draining_server import DrainingServer

from .tiny import tiny_engine

TEXT = "A quick brown fox jumps over the lazy dog, and then does it again. " * 3
ONE = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
LONG = ONE | {"max_tokens": 400}


@contextmanager
def serving(
    loaded: LoadedModel,
    *,
    shutdown_timeout: float = 60,
    cache_control: bool = True,
    step_seconds: float = 0,
    **config,
) -> Iterator[tuple[DrainingServer, threading.Thread, httpx.Client]]:
    """A server of its own in a thread, slow if wanted: itself, the thread and a client."""
    engine = tiny_engine(loaded, **config)
    step_fn = engine.step
    engine.step = lambda: (time.sleep(step_seconds), step_fn())[1]
    with AsyncEngine(engine) as async_engine, socket.create_server(("127.0.0.1", 0)) as listener:
        server = DrainingServer(
            uvicorn.Config(
                create_app(async_engine, cache_control=cache_control),
                log_level="warning",
                timeout_graceful_shutdown=15,
            ),
            async_engine=async_engine,
            announcement="",
            shutdown_timeout=shutdown_timeout,
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            url = "http://{}:{}".format(*listener.getsockname())
            with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
                yield server, thread, http
        finally:
            server.should_exit = True
            thread.join()
    assert engine.stats().num_active_blocks == 0
    engine.check_invariants()


@pytest.fixture(scope="module")
def http(tiny: LoadedModel) -> Iterator[httpx.Client]:
    with serving(tiny, max_model_len=256) as (_, _, client):
        yield client


def ok(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.slow
def test_a_prompt_is_explained_pinned_kept_and_forgotten(http: httpx.Client) -> None:
    prompt = {"prompt": TEXT}
    ok(http.post("/reset_prefix_cache"))
    assert ok(http.post("/cache/explain", json=prompt))["reason"] == "new"
    num_tokens = ok(http.post("/v1/completions", json=ONE))["usage"]["prompt_tokens"]
    told = ok(http.post("/cache/explain", json=prompt))
    assert (told["reason"], told["num_cached_tokens"]) == ("whole", num_tokens - 1)
    assert "always computed" in told["message"]
    other = ok(http.post("/cache/explain", json=prompt | {"cache_salt": "b"}))
    assert other["num_cached_tokens"] == 0
    pinned = num_tokens // 8 * 8
    asked = prompt | {"ttl_seconds": 3600.0}
    assert ok(http.post("/cache/pin", json=asked)) == {"pinned_tokens": pinned}
    ok(http.post("/reset_prefix_cache", params={"keep_pinned": True}))
    assert ok(http.post("/cache/explain", json=prompt))["num_cached_tokens"] == pinned
    assert ok(http.post("/cache/unpin", json=prompt)) == {}
    freed = ok(http.post("/reset_prefix_cache", params={"keep_pinned": True}))["freed_blocks"]
    assert freed == pinned // 8
    assert ok(http.post("/cache/explain", json=prompt))["num_cached_tokens"] == 0


@pytest.mark.slow
def test_a_conversation_is_a_prompt_too(http: httpx.Client) -> None:
    conversation = {"messages": [{"role": "user", "content": TEXT}]}
    body = conversation | {"model": "tiny", "max_tokens": 1}
    usage = ok(http.post("/v1/chat/completions", json=body))["usage"]
    told = ok(http.post("/cache/explain", json=conversation))
    assert told["num_tokens"] == usage["prompt_tokens"] == told["num_cached_tokens"] + 1


def test_more_pins_than_the_budget_are_a_conflict(http: httpx.Client) -> None:
    prompts = [[i] * 200 for i in range(1, 8)]
    statuses = []
    for prompt in prompts:
        ok(http.post("/v1/completions", json=ONE | {"prompt": prompt}))
        response = http.post("/cache/pin", json={"prompt": prompt})
        statuses.append(response.status_code)
    assert statuses == [200] * 5 + [409] * 2  # 25 blocks each, of 127
    assert error_of(response, 409)["code"] == "pin_budget_exceeded"
    ok(http.post("/reset_prefix_cache"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/explain", {}, "prompt"),
        ("/cache/explain", {"prompt": ""}, "prompt"),
        ("/cache/explain", {"prompt": ["a", "b"]}, "prompt"),
        ("/cache/explain", {"prompt": [1] * 256}, "prompt"),
        ("/cache/explain", {"prompt": [10**6]}, "prompt"),
        (
            "/cache/explain",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "prompt",
        ),
        ("/cache/explain", {"messages": [{"role": "user", "content": TEXT * 9}]}, "messages"),
        ("/cache/explain", {"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ("/cache/explain", {"prompt": "a", "adapter": "none such"}, "adapter"),
        ("/cache/explain", {"prompt": "a", "ttl_seconds": 1}, "ttl_seconds"),
        ("/cache/pin", {"prompt": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("/cache/pin", {"prompt": "a", "ttl_seconds": "1"}, "ttl_seconds"),
        ("/cache/unpin", {"prompt": 5}, "prompt"),
        ("/v1/completions", ONE | {"priority": 1}, "priority"),
        ("/v1/completions", ONE | {"priority": 1.5}, "priority"),
        ("/v1/completions", ONE | {"timeout_s": 0}, "timeout_s"),
        ("/v1/completions", ONE | {"timeout_s": "1"}, "timeout_s"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict, param: str) -> None:
    error = error_of(http.post(path, json=body), 400)
    assert error["param"] == param
    assert param in error["message"]


def test_a_text_that_runs_out_of_time_ends_as_it_stands(http: httpx.Client) -> None:
    whole = ok(http.post("/v1/completions", json=LONG | {"max_tokens": 190}))["choices"][0]
    late = ok(http.post("/v1/completions", json=LONG | {"max_tokens": 190, "timeout_s": 1e-6}))
    choice = late["choices"][0]
    assert (choice["finish_reason"], late["usage"]["completion_tokens"]) == ("timeout", 0)
    assert whole["text"].startswith(choice["text"])
    in_time = ok(http.post("/v1/completions", json=ONE | {"timeout_s": 100, "priority": 0}))
    assert in_time["choices"][0]["finish_reason"] == "length"


def test_unless_it_is_asked_for_nobody_controls_the_cache(tiny: LoadedModel) -> None:
    with serving(tiny, cache_control=False) as (_, _, http):
        for path in ("/cache/explain", "/cache/pin", "/cache/unpin", "/reset_prefix_cache"):
            assert error_of(http.post(path, json={"prompt": "a"}), 404)["code"] == "unknown_url"


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_again(tiny: LoadedModel) -> None:
    with serving(tiny, max_num_seqs=1, max_waiting=1, step_seconds=0.1) as (_, _, http):
        long = LONG | {"stream": True}
        with http.stream("POST", "/v1/completions", json=long) as running:
            lines = running.iter_lines()  # dropped, it would close the stream
            next(lines)
            with http.stream("POST", "/v1/completions", json=long) as waiting:
                # The answer to a stream begins when the request has been taken.
                assert waiting.status_code == 200
                response = http.post("/v1/completions", json=ONE)
        error = error_of(response, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        assert http.post("/v1/completions", json=ONE).status_code == 200


def test_a_server_that_stops_finishes_what_it_has_and_refuses_the_rest(tiny: LoadedModel) -> None:
    with serving(tiny, step_seconds=0.1) as (server, thread, http):
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.should_exit = True
            deadline = time.monotonic() + 60
            while (refused := http.post("/v1/completions", json=ONE)).status_code == 200:
                assert time.monotonic() < deadline
            assert error_of(refused, 503)["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            assert error_of(http.get("/health"), 503)["code"] == "draining"
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_what_does_not_finish_in_time_is_told_so(tiny: LoadedModel) -> None:
    with serving(tiny, shutdown_timeout=0, step_seconds=0.1) as (server, thread, http):
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.should_exit = True
            *_, last = (line for line in lines if line)
        assert "shut down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        thread.join(timeout=60)
        assert not thread.is_alive()
