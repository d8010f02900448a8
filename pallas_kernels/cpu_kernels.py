"""Kernels that Numba compiles for CPUs and XLA calls: where they are, and whether there are any."""

from __future__ import annotations

import os
from importlib import import_module, metadata

from .chips import current_platform

_OPS = ("paged_attention", "linear", "gather_blocks")


def cpu_kernels() -> str | None:
    """Make CPU kernels known to XLA; returns what compiled them, None if there are none.

    A program that was compiled in another process needs this before it is loaded.
    """
    try:
        for op in _OPS:
            registered(op)
    except NotImplementedError:
        return None
    return f"numba {metadata.version('numba')}"


def registered(op: str) -> str:
    """The name under which XLA knows an op's kernel.

    Raises:
        NotImplementedError: there is none here.
    """
    if current_platform() != "cpu":
        raise NotImplementedError("it runs on CPUs only")
    try:
        return import_module(f".{op}.numba_call", __package__).register()
    except ImportError as error:
        raise NotImplementedError(f"{error}: pip install 'octavo[cpu]'") from error
    except RuntimeError as error:  # no folder for what it compiles can be written
        raise NotImplementedError(f"{error}: set NUMBA_CACHE_DIR") from error


def num_threads() -> int:
    """Threads that a kernel may use."""
    return os.cpu_count() or 1
