"""A real server on a free port, in a thread of this process, around the real model."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from octavo.models import LoadedModel
from octavo.serve import Completion, Engine, EngineConfig, tiers
from octavo.serve.api import create_app
from octavo.serve.async_engine import AsyncEngine
from octavo.serve.metrics import ServerMetrics
from octavo.serve.outputs import EngineStats

from .tiered import SIZES, one, tiered
from .tiny import tiny_engine, tiny_model

MODEL = "smollm2"
# Small, so that few programs are compiled.
CONFIG = EngineConfig(num_blocks=400, max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=32)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server and what tests look at behind it."""

    url: str
    async_engine: AsyncEngine

    def stats(self) -> EngineStats:
        """The engine's counters, between two steps."""
        return asyncio.run(self.async_engine.stats())

    def wait_until(self, condition, seconds: float = 60.0) -> EngineStats:
        """The first stats that fulfil `condition`; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"never came true; last {stats}"
            time.sleep(0.05)
        return stats


def serve_in_thread(async_engine: AsyncEngine, **options: Any) -> Iterator[Served]:
    """Runs the server around `async_engine` until the generator is resumed."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(async_engine, model_name=MODEL, **options)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, loop="asyncio")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        host, port = listener.getsockname()
        yield Served(url=f"http://{host}:{port}", async_engine=async_engine)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def server(smollm2) -> Iterator[Served]:
    """The server that all tests of HTTP share."""
    engine = Engine(smollm2, CONFIG)
    yield from serve_in_thread(AsyncEngine(engine, metrics=ServerMetrics(MODEL)))
    engine.check_invariants()
    assert engine.stats().num_active_blocks == 0


@pytest.fixture(scope="session")
def http(server) -> Iterator[httpx.Client]:
    """A plain HTTP client of the server."""
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the server, which would hide a failure if it tried again."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(smollm2: LoadedModel) -> LoadedModel:
    """A model of two small layers, with random weights and a real tokenizer."""
    return tiny_model(smollm2)


@pytest.fixture(scope="module")
def unshared(tiny: LoadedModel) -> Engine:
    """An engine of the small model that shares nothing."""
    return tiny_engine(tiny, **(SIZES | {"enable_prefix_caching": False, "num_blocks": 100}))


@pytest.fixture(scope="module")
def cold(unshared: Engine) -> Callable[[list[int]], Completion]:
    """What a request gets there."""
    return lambda prompt: one(unshared, prompt)


@pytest.fixture(scope="module")
def shared_tiers(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with host memory and a disk below it."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tiers, "_BATCH_BLOCKS", 4)  # so that a prompt is several batches
    patch.setattr(tiers, "_LENT_BLOCKS", 8)
    engine = tiered(tiny, host=200, disk=tmp_path_factory.mktemp("blocks"))
    patch.undo()
    yield engine
    engine.close()


@pytest.fixture
def tiered_engine(shared_tiers: Engine) -> Iterator[Engine]:
    """The same, empty; nothing may leak from it."""
    shared_tiers.reset_cache(disk=True)
    yield shared_tiers
    stats = shared_tiers.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert shared_tiers._restores._num_loads == 0
    shared_tiers.check_invariants()


@pytest.fixture
def broken_server(smollm2) -> Iterator[tuple[Served, Callable[[], None]]]:
    """A server of its own, and a function that makes its engine's next step raise."""
    engine = Engine(smollm2, CONFIG)

    def out_of_luck():
        raise RuntimeError("out of luck")

    def fail_now():
        engine.step = out_of_luck

    for served in serve_in_thread(AsyncEngine(engine, metrics=ServerMetrics(MODEL))):
        yield served, fail_now


@pytest.fixture
def new_async_engine(smollm2) -> Iterator[AsyncEngine]:
    """An engine thread of its own, to be broken."""
    with AsyncEngine(Engine(smollm2, CONFIG)) as async_engine:
        yield async_engine
