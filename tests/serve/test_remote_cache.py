"""Engines that share a server's blocks: the same tokens as without, whatever becomes of it."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.paged.cost_model import HARDWARE, CostModel
from octavo.paged.tiers import RemoteTier, remote_client
from octavo.serve import Completion, Engine, EngineConfig
from octavo.serve.metrics import ServerMetrics
from octavo.serve.model_shape import shape_of
from octavo.serve.restore_choice import RestoreChoice

from ..valkey_server import ValkeyServer
from .test_cli import run
from .tiered import GREEDY, SIZES, evict, kept, one, prompt, stack_of
from .tiny import tiny_adapter, tiny_engine

NUM_ENGINES = 2


@pytest.fixture(scope="module")
def sharing(
    tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ValkeyServer, list[Engine]]]:
    """A server, and engines that have nothing but it, with adapters."""
    server = ValkeyServer(tmp_path_factory.mktemp("server"))
    server.start()
    patch = pytest.MonkeyPatch()
    patch.setattr(remote_client, "_SOCKET_SECONDS", 0.5)
    own = {"remote_cache_url": server.url, "max_loras": 2, "max_lora_rank": 4}
    engines = [tiny_engine(tiny, **(SIZES | own)) for _ in range(NUM_ENGINES)]
    patch.undo()
    for engine in engines:
        for seed, name in enumerate(("poet", "sql")):
            engine.load_adapter(name, tiny_adapter(tiny.config, seed))
        # A busy machine is no outage; and after one nobody here has long to wait.
        tier_of(engine)._look_up_seconds, tier_of(engine)._server._pause_s = 20.0, 0.1
    yield server, engines
    for engine in engines:
        engine.close()
    server.close()
    assert not any(thread.name.startswith("octavo-tier") for thread in threading.enumerate())


@pytest.fixture
def server(sharing: tuple[ValkeyServer, list[Engine]]) -> ValkeyServer:
    return sharing[0]


@pytest.fixture
def engines(sharing: tuple[ValkeyServer, list[Engine]]) -> Iterator[list[Engine]]:
    """Two engines with nothing in their caches, nor on the server; nothing may leak from them."""
    engines = sharing[1]
    for engine in engines:
        engine.reset_cache(remote=True)
        reach(engine)
    yield engines
    for engine in engines:
        assert engine.stats().num_active_blocks == engine._restores._num_loads == 0
        engine.check_invariants()


def tier_of(engine: Engine) -> RemoteTier:
    (tier,) = stack_of(engine).tiers
    assert isinstance(tier, RemoteTier)
    return tier


def reach(engine: Engine) -> None:
    """Wait until an engine uses its server."""
    deadline, tier = time.monotonic() + 30, tier_of(engine)
    while tier.look_up([]) or tier._server.is_open:
        assert time.monotonic() < deadline, "it is left alone for ever"
        time.sleep(0.01)


@pytest.mark.slow
def test_what_one_engine_computed_others_get_with_the_same_bits(
    server: ValkeyServer, engines: list[Engine], cold
) -> None:
    first, second = engines
    before = second.stats()
    mine = one(first, prompt(0))
    bits = kept(first, prompt(0))
    stack_of(first).flush()
    assert second.explain(prompt(0)).num_tier_tokens == 96
    theirs, after = one(second, prompt(0)), second.stats()
    assert (mine.num_cached_tokens, theirs.num_cached_tokens) == (0, 96)
    assert mine.token_ids == theirs.token_ids == cold(prompt(0)).token_ids
    np.testing.assert_array_equal(kept(second, prompt(0)), bits)
    assert after.external_hit_tokens - before.external_hit_tokens == 96
    assert after.tiers["remote"].hits - before.tiers["remote"].hits == 12
    assert len(server.client.keys()) == 13  # and nothing was written twice
    page = ServerMetrics("tiny").render(after)[0].decode()
    assert re.search(r"octavo:tier_hits_total\{model_name=\"tiny\",tier=\"remote\"\} [1-9]", page)
    second.reset_cache()
    assert one(second, prompt(0)).num_cached_tokens == 96  # that leaves a server alone
    for engine in engines:
        engine.reset_cache(remote=True)
        assert one(engine, prompt(0)).num_cached_tokens == 0
        stack_of(engine).flush()  # or what it has saved would arrive after
        server.client.flushall()


@pytest.mark.slow
def test_what_an_engine_has_no_room_for_comes_back(engines: list[Engine], cold) -> None:
    engine = engines[0]
    one(engine, prompt(0))
    evict(engine)
    again = one(engine, prompt(0))
    assert (again.num_cached_tokens, again.token_ids) == (96, cold(prompt(0)).token_ids)


@pytest.mark.slow
def test_no_engine_serves_across_salts_or_adapters(engines: list[Engine]) -> None:
    def ask(engine: Engine, salt: str, adapter: str | None) -> Completion:
        request_id = engine.add_request(prompt(0), GREEDY, cache_salt=salt, adapter=adapter)
        (answer,) = engine.collect([request_id])
        stack_of(engine).flush()
        engine.reset_cache()
        return answer

    kinds = [("", None), ("a", None), ("b", None), ("", "poet"), ("", "sql"), ("a", "poet")]
    first = {kind: ask(engines[0], *kind) for kind in kinds}
    assert [answer.num_cached_tokens for answer in first.values()] == [0] * len(kinds)
    for kind, mine in first.items():
        theirs = ask(engines[1], *kind)
        assert (theirs.num_cached_tokens, theirs.token_ids) == (96, mine.token_ids)
    assert ask(engines[1], "ab", None).num_cached_tokens == 0
    assert len({answer.token_ids for answer in first.values()}) == 3


@pytest.mark.parametrize(("rate", "num_cached"), [(1.0, 0), (1e15, 96)])
def test_blocks_come_over_a_network_that_is_fast_enough(
    engines: list[Engine], cold, monkeypatch: pytest.MonkeyPatch, rate: float, num_cached: int
) -> None:
    first, second = engines
    one(first, prompt(0))
    stack_of(first).flush()
    machine = replace(
        HARDWARE["h100"], peak_remote_bytes=rate, peak_link_bytes=1e15, peak_flops=1e9
    )
    shape = shape_of(second.loaded.model.config, param_dtype_bytes=4, kv_dtype_bytes=4)
    choice = RestoreChoice(CostModel(shape, machine, chunk_size=32), SIZES["block_size"])
    monkeypatch.setattr(second._restores, "choice", choice)
    answer = one(second, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (num_cached, cold(prompt(0)).token_ids)
    assert choice.stats.num_restored == (num_cached > 0)


def test_damaged_values_are_computed_again_and_no_request_notices(
    server: ValkeyServer, engines: list[Engine], cold, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = engines
    one(first, prompt(0))
    stack_of(first).flush()
    before = second.stats().tiers["remote"]
    lower = second._runner.tiers
    assert lower is not None
    namespace = second._intake.namespace_key("", None)
    name = f"octavo:{lower.keys(namespace, np.asarray(prompt(0), np.int32))[5].hex()}"
    server.client.setrange(name, 500, b"no keys, no values")
    answer = one(second, prompt(0))
    assert (answer.num_cached_tokens, answer.token_ids) == (40, cold(prompt(0)).token_ids)
    after = second.stats().tiers["remote"]
    assert (after.errors - before.errors, after.misses - before.misses) == (1, 1)
    assert [name in line for line in caplog.messages] == [True]
    stack_of(second).flush()
    first.reset_cache()
    assert one(first, prompt(0)).num_cached_tokens == 96  # written again


def test_a_server_that_dies_and_comes_back_costs_time_and_a_line_each(
    server: ValkeyServer, engines: list[Engine], cold, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests run while it is killed, while it is gone, and when it is there again."""
    prompts = [[*prompt(seed % 3, 90), *prompt(100 + seed, 10)] for seed in range(15)]
    for round_of, at in enumerate((4, 9, 14)):
        requests, answers = {}, {}
        for i, tokens in enumerate(prompts):
            for engine in engines:
                requests[engine.add_request(tokens, GREEDY), engine] = i
            if i == at and round_of != 1:
                server.kill()
            for engine in engines:
                for output in engine.step():
                    answers.setdefault((output.request_id, engine), []).extend(output.token_ids)
        for engine in engines:
            while engine.num_unfinished:
                for output in engine.step():
                    answers.setdefault((output.request_id, engine), []).extend(output.token_ids)
        for request, i in requests.items():
            assert tuple(answers[request]) == cold(prompts[i]).token_ids
        if round_of == 1:
            server.start()
            for engine in engines:
                reach(engine)
        for engine in engines:
            engine.reset_cache()
    assert 0 < len(caplog.messages) <= 2 * NUM_ENGINES
    assert all("left alone" in line for line in caplog.messages)
    server.start()
    for engine in engines:
        reach(engine)
    one(engines[0], prompt(0))
    stack_of(engines[0]).flush()
    assert one(engines[1], prompt(0)).num_cached_tokens == 96


def test_a_server_that_hangs_while_blocks_are_read_stops_no_request(
    server: ValkeyServer,
    engines: list[Engine],
    cold,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = engines
    one(first, prompt(0))
    stack_of(first).flush()
    request_id = second.add_request(prompt(0), GREEDY)
    tier = tier_of(second)
    with server.stopped():
        # It stops after it has said that they are there, and before it sends one of them.
        found = dict.fromkeys(tier_of(first)._known)
        monkeypatch.setattr(tier, "look_up", lambda keys: tier._known.update(found))
        begin = time.monotonic()
        (answer,) = second.collect([request_id])
        assert time.monotonic() - begin < 20
    monkeypatch.undo()
    assert (answer.num_cached_tokens, answer.token_ids) == (0, cold(prompt(0)).token_ids)
    assert second.stats().tiers["remote"].misses > 0 and len(caplog.messages) == 1


def test_a_url_is_checked_at_the_start_and_told_nowhere(tiny: LoadedModel) -> None:
    url = "redis://:secret@127.0.0.1:1"
    config = EngineConfig(remote_cache_url=url)
    assert "secret" not in repr(config) and config.has_lower_tiers
    with pytest.raises(ValueError, match="must be redis://") as caught:
        tiny_engine(tiny, **(SIZES | {"remote_cache_url": "http://:secret@host"}))
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        EngineConfig(remote_cache_url=url, enable_prefix_caching=False)


def test_the_command_says_what_is_wrong_with_a_remote_cache(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.serve.cli.load_model", lambda *args, **kwargs: tiny)
    command = ("generate", "smollm2", "x", "--num-blocks", "9", "--remote-cache-url")
    code, _, text = run(*command, "host:secret")
    assert code == 2 and "must be redis://" in text and "secret" not in text
    monkeypatch.setitem(sys.modules, "redis", None)
    code, _, text = run(*command, "redis://host")
    assert code == 2 and "pip install 'octavo[remote]'" in text
