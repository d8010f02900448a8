"""What holds for every test: CPU, strict dtype promotion, no network, compiled programs kept."""

import ctypes
import gc
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Through the environment, before JAX is imported, so that the processes which tests start (servers,
# the command line) get the same. Whoever sets one of these keeps it: JAX_PLATFORMS=cuda runs the
# suite on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

# No silent promotion of dtypes: in every thread (an engine runs in its own), at collection too.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--constant-hash",
        action="store_true",
        help="give all blocks one hash, in this process: a collision may cost time, nothing else",
    )
    parser.addoption(
        "--kernels",
        action="store_true",
        help="run the kernels' full matrix of cases, implementations and chips",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("kernels"):
        left_out = [item for item in items if item.get_closest_marker("kernels")]
        items[:] = [item for item in items if not item.get_closest_marker("kernels")]
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("constant_hash"):
        # Before anything is traced; the programs differ, and so do their keys in the kept cache.
        from octavo.paged import hashing

        hashing._mix = jnp.zeros_like
        hashing._MULTIPLIER = 1


@pytest.fixture(autouse=True, scope="module")
def not_too_many_programs() -> Iterator[None]:
    """Drop compiled programs after a module, if there are many.

    Each takes dozens of memory mappings, of which a process may have 65,530 on Linux: with those of
    the whole suite XLA aborts. What is compiled again comes from the folder.
    """
    yield
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
    # What compilers have given back would else stay with this process: gigabytes by the end.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Compile a module's programs in less time, hardly optimised.

    For programs of whole numbers: they compute the same either way.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine."""


def _is_local(host: str | bytes | None) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuses look-ups of and connections to anything but this machine (in this process)."""
    patch = pytest.MonkeyPatch()
    look_up = socket.getaddrinfo

    def guarded_look_up(host, *args, **kwargs):
        if not _is_local(host):
            raise NetworkBlocked(f"tests run without network: a look-up of {host!r}")
        return look_up(host, *args, **kwargs)

    def guard(name: str) -> None:
        original = getattr(socket.socket, name)

        def guarded(self: socket.socket, *args):
            address = args[-1]  # sendto may have flags before it
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
                raise NetworkBlocked(f"tests run without network: {name} to {address!r}")
            return original(self, *args)

        patch.setattr(socket.socket, name, guarded)

    patch.setattr(socket, "getaddrinfo", guarded_look_up)
    for name in ("connect", "connect_ex", "sendto"):
        guard(name)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def smollm2():
    """The demo model with its real tokenizer, in float32, loaded once for the whole run."""
    from octavo.models import load_model

    return load_model("smollm2")
