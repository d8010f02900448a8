"""The rules that conftest.py lays on every test are in force."""

import os
import socket
import threading

import jax
import jax.numpy as jnp
import pytest

# A name and two addresses that are reserved for documentation: nothing there answers, ever.
ELSEWHERE = ["host.example", "192.0.2.1", "2001:db8::1"]


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_connection_to_another_machine_is_refused(host):
    with pytest.raises(RuntimeError, match="without network"):
        socket.create_connection((host, 80), timeout=1)


def test_a_datagram_and_a_quiet_connection_are_refused_too():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with pytest.raises(RuntimeError, match="sendto"):
            sock.sendto(b"?", ("192.0.2.1", 53))
        with pytest.raises(RuntimeError, match="connect_ex"):
            sock.connect_ex(("192.0.2.1", 53))


def test_this_machine_is_within_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, port), timeout=5).close()
    left, right = socket.socketpair()
    left.sendall(b"x")
    assert right.recv(1) == b"x"
    left.close()
    right.close()


def test_dtypes_never_promote_silently_in_any_thread():
    outcomes = []

    def add():
        try:
            jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.int32))
        except ValueError as error:
            outcomes.append(type(error).__name__)

    add()
    thread = threading.Thread(target=add)
    thread.start()
    thread.join()
    assert outcomes == ["TypePromotionError"] * 2


def test_the_platform_and_the_program_cache_are_those_of_the_environment():
    for name in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"):
        assert getattr(jax.config, name.lower()) == os.environ[name]
