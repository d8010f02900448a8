"""The HTTP server itself: forms of prompts, server-sent events, disconnection, failure."""

import json
import logging
import runpy
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"


def complete(http, **fields):
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 6} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_server_is_healthy_and_documents_itself(http):
    assert http.get("/health").json() == {"status": "ok"}
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest"} <= schemas.keys()


def test_text_and_token_ids_are_the_same_prompt(http, smollm2):
    ids = smollm2.tokenizer.encode(PROMPT)
    forms = (PROMPT, [PROMPT], ids, [ids])
    answers = [complete(http, prompt=prompt) for prompt in forms]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(ids)}


def test_a_completion_has_sixteen_tokens_unless_asked(http):
    assert complete(http, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_text_parts_are_joined_and_developer_means_system(http):
    def ask(system, content):
        messages = [{"role": system, "content": "Be brief."}, {"role": "user", "content": content}]
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 4}
        return http.post("/v1/chat/completions", json=body).json()

    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    one, other = ask("system", "Say\nhello."), ask("developer", parts)
    assert one["choices"] == other["choices"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def test_a_stream_is_made_of_server_sent_events(http):
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == complete(http)["choices"][0]["text"]
    assert len(chunks) > 1


def test_requests_at_once_are_answered_as_if_alone(http):
    prompts = [f"{PROMPT} number {i}" for i in range(6)]
    alone = [complete(http, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(pool.map(lambda p: complete(http, prompt=p)["choices"][0]["text"], prompts))
    assert at_once == alone


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_goes_away_gives_its_blocks_back(server, stream):
    before = server.wait_until(lambda stats: stats.num_active_blocks == 0)
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
    payload = json.dumps(body | {"stream": stream, "n": 2}).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(payload), payload)
        )
        server.wait_until(lambda stats: stats.num_running == 2)
        assert server.stats().num_active_blocks > 0
    after = server.wait_until(lambda stats: stats.num_active_blocks == 0)
    assert after.num_cancelled == before.num_cancelled + 2
    assert after.generated_tokens < before.generated_tokens + 2 * 1500


def test_an_engine_that_fails_says_so_everywhere(broken_server, caplog):
    caplog.set_level(logging.CRITICAL, logger="octavo.serve.async_engine")
    served, fail_now = broken_server
    long = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
    with (
        httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(http.post, "/v1/completions", json=long)
        stream = client.completions.create(
            model="smollm2",
            prompt=PROMPT,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        served.wait_until(lambda stats: stats.num_running == 2)
        fail_now()
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)
        for response in (
            whole.result(),
            http.post("/v1/completions", json=long),
            http.get("/health"),
        ):
            assert response.status_code == 503
            assert "out of luck" in response.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200


def test_the_benchmark_client_measures_this_server(server, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "result.json"
    options = "--requests 3 --prefix 40 --suffix 4 --output 5 --repeats 1 --no-sharing"
    arguments = [*options.split(), "--base-url", f"{server.url}/v1", "--save", str(saved)]
    monkeypatch.setattr("sys.argv", ["shared_prefix.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / "shared_prefix.py"), run_name="__main__")
    assert end.value.code == 0, capsys.readouterr().err
    medians = json.loads(saved.read_text())["medians"]
    assert medians.keys() == {"cold", "warm", "apart"}
    assert medians["warm"]["cached_tokens_mean"] > 20 > medians["apart"]["cached_tokens_mean"]
