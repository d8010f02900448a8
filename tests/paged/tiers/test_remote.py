"""The remote tier: right or nothing, and soon, whatever becomes of the server and its values."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.paged.tiers import HostTier, RemoteTier, TierStack, block_format, remote, remote_client

from ...valkey_server import ValkeyServer
from .blocks import BLOCK_BYTES, DAMAGES, SIZES, has, held, key, payload, put, tokens
from .test_killed_writers import killed_writers

VALUE_BYTES = block_format.num_bytes(SIZES["block_size"], BLOCK_BYTES)
# Generous where the server answers, since the machine may be busy.
PATIENT, PAUSE = 20.0, 0.1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("server"))
    server.start("--appendonly", "no")
    yield server
    server.close()


@pytest.fixture
def server(running: ValkeyServer) -> ValkeyServer:
    """A server that runs and is empty; those who kill it take `mortal`."""
    running.client.flushall()
    return running


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def new_tier(monkeypatch: pytest.MonkeyPatch):
    """Makes tiers of a server, and closes them in the end."""
    monkeypatch.setattr(remote_client, "_SOCKET_SECONDS", 0.5)
    tiers = []

    def make(server: ValkeyServer | str, **options) -> RemoteTier:
        url = server if isinstance(server, str) else server.url
        own: dict[str, Any] = {"look_up_seconds": PATIENT, "pause_seconds": PAUSE}
        tiers.append(RemoteTier(url, **(SIZES | own | options)))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()
    assert not any(thread.name.startswith("octavo-tier") for thread in threading.enumerate())


def name_of(number: int) -> str:
    return f"octavo:{key(number).hex()}"


def found(tier: RemoteTier, *numbers: int) -> list[int]:
    """Which of a sequence's blocks are there, as the server says."""
    tier.look_up([key(number) for number in numbers])
    return [number for number in numbers if key(number) in tier]


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def put_again(tier: RemoteTier, *numbers: int) -> None:
    """Put blocks as soon as the server is tried and answers."""

    def answers() -> bool:
        tier.look_up([])
        return not tier._server.is_open

    wait_until(answers)
    put(tier, *numbers)


def test_what_one_engine_has_stored_others_find(server, new_tier):
    first, second = new_tier(server), new_tier(server)
    put(first, 1, 2)
    assert found(second, 1, 2, 3) == [1, 2] and held(second, 1, 2, 3) == [1, 2]
    stats = second.stats()
    assert (stats.hits, stats.misses, stats.errors, stats.num_blocks) == (2, 1, 0, 2)
    assert (stats.num_bytes, stats.budget_bytes) == (2 * VALUE_BYTES, 0)
    assert set(server.client.keys()) == {name_of(1).encode(), name_of(2).encode()}


def test_what_is_known_to_be_there_is_not_written_again(server, new_tier):
    put(new_tier(server), 1)
    server.client.config_resetstat()
    tier = new_tier(server)
    assert found(tier, 1, 2) == [1]
    put(tier, 1, 2, 2)
    assert server.client.info("commandstats")["cmdstat_set"]["calls"] == 1
    assert held(tier, 1, 2) == [1, 2]


@pytest.mark.parametrize("missing", [0, 5, 63, 64, 130, 199])
def test_a_look_up_finds_a_sequence_up_to_its_first_gap(server, new_tier, missing):
    numbers = range(200)
    server.client.mset({name_of(number): b"x" for number in numbers if number != missing})
    tier = new_tier(server)
    there = found(tier, *numbers)
    assert there[:missing] == list(range(missing)) and missing not in there
    server.client.mset({name_of(missing): b"x"})
    assert found(tier, *numbers) == list(numbers)
    server.client.flushall()
    assert found(tier, *numbers) == []


def test_a_sequence_is_read_in_pieces_until_one_is_missing(server, new_tier, monkeypatch):
    monkeypatch.setattr(remote, "_PIECE_BYTES", 3 * VALUE_BYTES)
    tier, numbers = new_tier(server), range(10)
    put(tier, *numbers)
    server.client.delete(name_of(7))
    keys, rows = [key(number) for number in numbers], np.stack([tokens(n) for n in numbers])
    out = np.zeros((10, BLOCK_BYTES), np.uint8)
    assert tier.read(keys, rows, out) == 7
    assert all(np.array_equal(out[number], payload(number)) for number in range(7))
    assert (tier.stats().hits, tier.stats().misses, tier.stats().errors) == (7, 1, 0)
    assert key(7) not in tier and key(8) in tier
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.0)
    assert tier.read(keys, rows, out) == 3 and tier._server.is_open


def test_a_server_hears_what_is_used_elsewhere(server, new_tier):
    tier = new_tier(server)
    put(tier, 1, 2)
    server.client.config_resetstat()
    tier.touch([key(1), key(2)])
    assert found(tier, 3) == [] and found(tier, 1) == [1]
    assert server.client.info("commandstats")["cmdstat_touch"]["calls"] == 1


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "empty"])
def test_a_damaged_value_is_one_miss_one_error_one_line_and_removed(
    server, new_tier, caplog, damage
):
    tier = new_tier(server)
    put(tier, 1, 2)
    data = bytearray(server.client.get(name_of(1)))
    assert len(data) == VALUE_BYTES
    DAMAGES[damage](data)
    server.client.set(name_of(1), bytes(data))
    assert found(tier, 1, 2) == [1, 2] and held(tier, 1, 2) == [2]
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.errors) == (1, 1, 1)
    assert [name_of(1) in line for line in caplog.messages] == [True]
    assert server.client.keys() == [name_of(2).encode()]
    put(tier, 1)  # computed again
    assert found(tier, 1) == [1] and has(tier, 1)


def test_foreign_values_are_misses_and_no_more_of_them_is_read(server, new_tier, caplog):
    tier = new_tier(server)
    put(tier, 1)
    server.client.rename(name_of(1), name_of(2))  # of another model, say
    server.client.set(name_of(3), bytes(64 << 20))
    server.client.rpush(name_of(4), "a list")
    before = server.client.info("stats")["total_net_output_bytes"]
    assert found(tier, 2, 3, 4) == [2, 3, 4] and held(tier, 2, 3, 4) == []
    assert server.client.info("stats")["total_net_output_bytes"] - before < 1 << 20
    assert (tier.stats().misses, tier.stats().errors, len(caplog.messages)) == (3, 3, 3)
    assert server.client.keys() == []


@pytest.mark.parametrize("gone", ["evicted", "empty"])
def test_a_value_that_is_gone_is_a_miss_and_no_error(server, new_tier, caplog, gone):
    tier = new_tier(server)
    put(tier, 1)
    server.client.delete(name_of(1))
    if gone == "empty":
        server.client.set(name_of(1), b"")
    assert key(1) in tier and not has(tier, 1) and key(1) not in tier
    assert (tier.stats().misses, tier.stats().errors, caplog.messages) == (1, 0, [])
    put(tier, 1)
    assert has(tier, 1)


def test_a_dead_server_costs_one_line_until_it_is_there(mortal, new_tier, caplog):
    tier = new_tier(mortal)
    wait_until(lambda: tier._server.is_open)  # without being asked for anything
    put(tier, 1, 2)
    assert found(tier, 1) == [] and not has(tier, 1)
    assert tier.stats().drops == 2 and tier.stats().errors >= 1
    time.sleep(2 * PAUSE)
    assert found(tier, 1) == []
    wait_until(tier._asking.done)
    assert [f"127.0.0.1:{mortal.port}/0" in line for line in caplog.messages] == [True]
    mortal.start()
    put_again(tier, 1)
    assert found(tier, 1) == [1] and has(tier, 1)
    mortal.kill()  # another outage is another line
    assert found(tier, 1) == [] and not has(tier, 1)
    assert len(caplog.messages) == 2
    mortal.start()
    put_again(tier)
    assert key(1) not in tier and found(tier, 1) == []  # it came back with nothing
    put(tier, 1)
    assert has(tier, 1)


def test_a_server_that_hangs_keeps_nobody_waiting(mortal, new_tier, caplog):
    mortal.start()
    tier = new_tier(mortal, queue_bytes=3 * BLOCK_BYTES)
    put(tier, 1)
    assert found(tier, 1) == [1]
    tier._look_up_seconds = 0.1
    with mortal.stopped():
        begin = time.monotonic()
        for number in range(2, 10):
            tier.put(key(number), tokens(number), payload(number))
        assert time.monotonic() - begin < 5 and tier.stats().drops == 5
        for _ in range(100):
            assert found(tier, 1) == []
        assert not has(tier, 1)
        tier.flush()
        assert time.monotonic() - begin < 15
        assert tier.stats().drops == 7  # those that waited behind the one that was on its way
        assert len(caplog.messages) == 1
        begin = time.monotonic()
        tier.close()
        assert time.monotonic() - begin < 15
    assert len(caplog.messages) == 1


def test_an_answer_that_comes_late_is_none(mortal, new_tier, monkeypatch):
    monkeypatch.setattr(remote_client, "_SOCKET_SECONDS", 10.0)
    mortal.start()
    tier = new_tier(mortal)
    put(tier, 1)
    tier._look_up_seconds = 0.1
    with mortal.stopped():
        assert found(tier, 1) == []
        time.sleep(2 * PAUSE)
        tier._look_up_seconds, begin = PATIENT, time.monotonic()
        assert found(tier, 1) == []  # nobody waits a second time
        assert time.monotonic() - begin < 5
    wait_until(tier._asking.done)
    assert tier._server.is_open and key(1) not in tier
    put_again(tier)
    assert found(tier, 1) == [1]


def test_a_read_from_a_server_that_hangs_is_a_miss(mortal, new_tier, caplog):
    mortal.start()
    tier = new_tier(mortal)
    put(tier, 1)
    with mortal.stopped():
        assert key(1) in tier and not has(tier, 1) and key(1) not in tier
    assert (tier.stats().misses, tier.stats().errors, len(caplog.messages)) == (1, 1, 1)
    put_again(tier, 1)
    assert has(tier, 1)


def test_close_drops_what_a_server_does_not_take_in_time(server, new_tier, monkeypatch):
    monkeypatch.setattr(remote, "_CLOSE_SECONDS", -1.0)
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(remote, "encoded", lambda *args: (begun.set(), go_on.wait(), b"")[2:])
    tier = new_tier(server)
    for number in range(5):
        tier.put(key(number), tokens(number), payload(number))
    begun.wait()
    closer = threading.Thread(target=tier.close)
    closer.start()
    wait_until(lambda: tier._write_until < time.monotonic())
    go_on.set()
    closer.join(30)
    assert not closer.is_alive() and tier.stats().drops == 4
    tier.put(key(9), tokens(9), payload(9))  # too late, and no harm
    assert tier.stats().drops == 5 and found(tier, 0) == [] and not has(tier, 0)


def test_a_full_server_is_read_and_takes_nothing_for_one_line(server, new_tier, caplog):
    tier = new_tier(server)
    put(tier, 1)
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", 1)
    try:
        put(tier, 2, 3, 4)
        assert held(tier, 1, 2, 3, 4) == [1]
        assert (tier.stats().errors, tier.stats().drops, len(caplog.messages)) == (1, 2, 1)
        assert "takes no blocks" in caplog.text
        time.sleep(2 * PAUSE)
        put(tier, 2)  # tried again
        assert (tier.stats().errors, len(caplog.messages)) == (2, 1)
    finally:
        server.client.config_set("maxmemory", 0)
    time.sleep(2 * PAUSE)
    put(tier, 2)
    assert held(tier, 1, 2) == [1, 2]


def test_under_lru_a_full_server_evicts_and_that_is_a_miss(server, new_tier):
    tier = new_tier(server)
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    server.client.config_set("maxmemory", used + 40 * VALUE_BYTES)
    try:
        put(tier, *range(300))
        assert tier.stats().errors == tier.stats().drops == 0
        assert found(tier, 299) == [299] and has(tier, 299)
        left = held(tier, *range(300))
        assert 0 < len(left) < 100 and tier.stats().misses == 300 - len(left)
    finally:
        server.client.config_set("maxmemory", 0)


def test_clearing_removes_the_blocks_of_all_engines_and_nothing_else(server, new_tier):
    tier = new_tier(server)
    put(new_tier(server), *range(20))
    server.client.set("somebody's", "own")
    assert found(tier, 1) == [1]
    tier.clear()
    assert found(tier, 1) == [] and server.client.keys() == [b"somebody's"]


def test_what_is_known_of_a_server_has_a_bound(server, new_tier, monkeypatch):
    monkeypatch.setattr(remote, "_MAX_KNOWN", 8)
    tier = new_tier(server)
    put(tier, *range(20))
    assert tier.stats().num_blocks == 8 and len(server.client.keys()) == 20
    assert found(tier, 0, 1) == [0, 1] and held(tier, 0, 1) == [0, 1]


def test_a_stack_asks_a_server_only_for_what_is_nowhere_nearer(server, new_tier):
    host = HostTier(budget_bytes=2 * BLOCK_BYTES, **SIZES)
    stack = TierStack([host, new_tier(server)], BLOCK_BYTES)
    keys, rows = [key(n) for n in range(5)], np.stack([tokens(n) for n in range(5)])
    stack.save(keys[:4], rows[:4], np.stack([payload(n) for n in range(4)]))
    stack.flush()
    out = np.zeros((5, BLOCK_BYTES), np.uint8)
    other = TierStack([host, new_tier(server)], BLOCK_BYTES)
    assert other.load(keys, rows, out) == ["host", "host"]  # the server was not asked
    assert other.num_held(keys) == 4 and other.stats()["remote"].num_blocks == 2
    assert other.load(keys, rows, out) == ["host", "host", "remote", "remote"]
    assert all(np.array_equal(out[n], payload(n)) for n in range(4))
    assert other.load(keys[2:], rows[2:], out) == ["host", "host"]  # brought up
    stack.close()
    other.close()


@pytest.mark.parametrize("place", ["unix", "password", "database"])
def test_urls_lead_to_sockets_passwords_and_databases(mortal, new_tier, tmp_path, place, caplog):
    path = tmp_path / "s"
    mortal.start("--unixsocket", str(path), password="p@ss/w#rd" if place == "password" else None)
    tier = new_tier(
        {
            "unix": f"unix://{path}",
            "password": f"redis://:p%40ss%2Fw%23rd@127.0.0.1:{mortal.port}",
            "database": f"redis://127.0.0.1:{mortal.port}/3",
        }[place]
    )
    put(tier, 1)
    assert found(tier, 1) == [1] and has(tier, 1)
    if place == "database":
        assert mortal.client.info("keyspace")["db3"]["keys"] == 1
    assert caplog.messages == []


def test_a_wrong_password_costs_a_line_that_does_not_tell_it(mortal, new_tier, caplog):
    mortal.start(password="right")
    tiers = [
        new_tier(f"redis://{who}127.0.0.1:{mortal.port}") for who in (":secret@", "me:secret@", "")
    ]
    for tier in tiers:
        wait_until(lambda tier=tier: tier._server.is_open)
        assert found(tier, 1) == []
    assert len(caplog.messages) == 3 and "secret" not in caplog.text
    assert not any("secret" in repr(thing) for t in tiers for thing in (t, t._redis, vars(t)))


@pytest.mark.parametrize(
    "url",
    [
        *("", "somewhere", "http://:secret@host", "redis:/:secret@host", "REDIS", "unix://"),
        *("redis://:secret@host:port", "redis://:sec/ret@host:1", "redis://:secret@host:99999"),
        *("redis://:secret@host/zero", "redis://:secret@host/0/1", "redis://:secret@host/-1"),
        *("redis://:secret@host?colour=secret", "redis://:secret@host?db=secret"),
    ],
)
def test_what_is_no_url_is_refused_without_telling_passwords(url):
    with pytest.raises(ValueError, match=r"must be redis://") as caught:
        RemoteTier(url, **SIZES)
    assert "sec" not in str(caught.value) and caught.value.__suppress_context__


def test_without_the_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install 'octavo\[remote\]'"):
        RemoteTier("redis://127.0.0.1", **SIZES)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":\r\n", b"", None])
def test_something_else_that_listens_there_is_left_alone(new_tier, caplog, answer):
    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        tier = new_tier(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        wait_until(lambda: tier._server.is_open)
        put(tier, 1)
        assert found(tier, 1) == [] and not has(tier, 1)
        assert len(caplog.messages) == 1
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def test_whatever_a_server_has_after_fifty_kills_is_right(mortal, new_tier, caplog):
    """It writes what it gets to a file, and is killed while it does."""
    rng = random.Random(0)
    keeps = ("--appendonly", "yes", "--appendfsync", "no")
    mortal.start(*keeps)
    tier, reader = (new_tier(mortal, pause_seconds=0.01) for _ in range(2))
    right = 0
    for _ in range(50):
        for each in (tier, reader):
            put_again(each)
        killer = threading.Timer(rng.uniform(0, 0.02), mortal.kill)
        killer.start()
        while killer.is_alive():
            number = rng.randrange(64)
            tier._remember((), instead_of=[key(number)])  # written again
            tier.put(key(number), tokens(number), payload(number))
            right += has(reader, rng.randrange(64))
        killer.join()
        tier.flush()
        mortal.start(*keeps)
    put_again(reader)
    kept = held(reader, *range(64))
    assert len(kept) > 10 and right > 0
    assert tier.stats().errors > 10 and reader.stats().errors > 10
    assert all("left alone" in line for line in caplog.messages)
    assert len(caplog.messages) <= 2 * 50


def test_whatever_a_server_has_after_sixty_killed_writers_is_right(server):
    right, wrong, errors = killed_writers(server.url, 60)[1:4]
    assert int(right) > 0
    assert (wrong, errors) == ("0", "0")
