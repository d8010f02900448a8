"""Compiled programs kept whole between runs, so that a start neither traces nor compiles them.

JAX's compilation cache finds a program by its text, for which it must be traced and lowered first:
a third of the work of a start. Here a program is found by all that its text follows from: the
code, the settings, the arguments' shapes, the versions and the machine. What is not found, or does
not load, is compiled.

Invariants:
1. Nothing is kept that JAX's cache may have loaded: XLA writes such a program out again without
   its machine code, which shows only when it runs. So there is one cache or the other.
2. What differs in anything that a program may follow from is never found.
3. A file is written whole or not at all, and its checksum holds before anything in it is used.

Whoever can write to the folder can run code as this process, as with JAX's cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from .. import models, paged, pallas_kernels
from ..pallas_kernels import cpu_kernels, debug_checks, interpret_kernels, kernel_tuning

_logger = logging.getLogger(__name__)

_SUFFIX = ".program"
# Of sets of programs for one code, machine and configuration; the least recently used one goes.
_MOST_SETS = 8
_CHECKSUM_BYTES = 32


class ProgramStore:
    """A folder with the programs of one set of settings.

    Args:
        folder: holds the sets of all settings.
        *settings: what the programs follow from beside their arguments; by their `repr`.
    """

    def __init__(self, folder: Path, *settings: object):
        self._root = folder
        self._folder = folder / _digest(_surroundings(), settings)[:32]
        if self._folder.exists():
            os.utime(self._folder)  # used now

    def load(self, name: str, size: int, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The program for arguments like these, or None if it is not kept or does not load."""
        path = self._path(name, size, args)
        try:
            stat = path.stat()
            written = stat.st_mtime_ns, stat.st_size
            return _read(path, written, jax.tree.structure((args, {})))
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.warning("%s cannot be read, compiling instead: %s", path, error)
            return None
        except Exception as error:  # whatever JAX or XLA raise: the program can still be compiled
            _logger.warning("%s does not load, compiling instead: %s", path, error)
            return None

    def save(
        self, name: str, size: int, args: tuple[Any, ...], compiled: jax.stages.Compiled
    ) -> None:
        """Keep a program; a folder that cannot be written is no error."""
        if jax_cache():  # chosen meanwhile
            return
        path = self._path(name, size, args)
        try:
            executable, _, out_tree = serialize_executable.serialize(compiled)
            # Structures of registered classes have no pickle of their own; trees of them do.
            results = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
            body = zlib.compress(pickle.dumps((executable, results)), level=1)
            self._make_folder()
            _write(path, hashlib.sha256(body).digest() + body)
        except jax.errors.JaxRuntimeError as error:
            # JAX has returned what an equal program has been compiled to in this process, and what
            # has run cannot be kept any more. Nobody need do anything about it.
            _logger.info("the program %r is not kept: %s", name, error)
        except Exception as error:
            _logger.warning("the program %r is not kept: %s", name, error)

    def _path(self, name: str, size: int, args: tuple[Any, ...]) -> Path:
        leaves, treedef = jax.tree.flatten(args)
        digest = _digest(name, size, str(treedef), [_kind(leaf) for leaf in leaves])
        return self._folder / f"{name.replace(' ', '-')}-{size}-{digest[:32]}{_SUFFIX}"

    def _make_folder(self) -> None:
        if not self._folder.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = [path for path in self._root.iterdir() if path != self._folder]
            others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
            for path in others[_MOST_SETS - 1 :]:
                shutil.rmtree(path, ignore_errors=True)


@lru_cache(maxsize=128)
def _read(path: Path, written: tuple[int, int], in_tree: Any) -> Callable[..., Any]:
    """The program in a file of that time and size.

    Engines of one process share it: each copy takes hundreds of memory mappings, of which a
    process may have 65,530.
    """
    data = path.read_bytes()
    checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() != checksum:
        raise ValueError("it is damaged")
    executable, results = pickle.loads(zlib.decompress(body))
    return serialize_executable.deserialize_and_load(
        executable, in_tree, jax.tree.structure(results)
    )


def jax_cache() -> str | None:
    """The folder of JAX's own cache of compiled programs."""
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def _kind(leaf: Any) -> tuple[object, ...]:
    """What of an argument a program depends on."""
    weak = bool(getattr(leaf, "weak_type", False))
    return tuple(leaf.shape), str(leaf.dtype), weak, repr(getattr(leaf, "sharding", None))


def _surroundings() -> list[object]:
    """The code and what compiles and runs it."""
    device = jax.devices()[0]
    contexts = (kernel_tuning, interpret_kernels, debug_checks)
    # Where JAX's cache is and what it logs changes no program, but telling which settings do
    # would be guesswork. Those that a thread may change are attributes.
    options = {
        name: repr(getattr(jax.config, name, value))
        for name, value in sorted(jax.config.values.items())
        if "cache" not in name
    }
    packages = [Path(package.__path__[0]) for package in (pallas_kernels, paged, models)]
    return [
        [_code_digest(root) for root in (*packages, Path(__file__).parent)],
        [version(name) for name in ("jax", "jaxlib", "flax", "numpy")],
        cpu_kernels(),
        sys.version,
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "NPROC")],
        options,
        [repr(context.value) for context in contexts],
        (device.platform, device.device_kind, device.client.platform_version, jax.device_count()),
        (platform.machine(), _cpu_features(), os.cpu_count(), _num_usable_cpus()),
    ]


def _code_digest(root: Path) -> str:
    """Of every source file of a package."""
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    return _digest([(str(path.relative_to(root)), path.read_bytes()) for path in files])


def _cpu_features() -> str:
    """What the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _num_usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _digest(*fields: object) -> str:
    return hashlib.sha256(repr(fields).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    # Whole or not at all, also when several processes write the same.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
