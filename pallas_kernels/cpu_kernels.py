"""Kernels that Numba compiles for CPUs and XLA calls: where they are, and whether there are any."""

from __future__ import annotations

import os
import threading
from importlib import import_module, metadata

from .chips import current_platform

_OPS = ("linear", "gather_blocks")
_LOCK = threading.Lock()


def cpu_kernels(cache_dtype: str | None = None) -> str | None:
    """Make CPU kernels known to XLA; returns what compiled them, None if there are none.

    A program that was compiled in another process needs this before it is loaded. Attention, which
    takes half a minute to compile for each dtype of caches, is among them only for a dtype given.
    """
    try:
        for op in _OPS:
            registered(op)
        if cache_dtype is not None:
            registered("paged_attention", cache_dtype)
    except NotImplementedError:
        return None
    return f"numba {metadata.version('numba')}"


def registered(op: str, *kind: str) -> str:
    """The name under which XLA knows an op's kernel, of a kind if there are several.

    Raises:
        NotImplementedError: there is none here.
    """
    if current_platform() != "cpu":
        raise NotImplementedError("it runs on CPUs only")
    try:
        with _LOCK:  # programs are compiled by several threads
            return import_module(f".{op}.numba_call", __package__).register(*kind)
    except ImportError as error:
        raise NotImplementedError(f"{error}: pip install 'octavo[cpu]'") from error
    except RuntimeError as error:  # no folder for what it compiles can be written
        raise NotImplementedError(f"{error}: set NUMBA_CACHE_DIR") from error


def num_threads() -> int:
    """Threads that a kernel may use."""
    return os.cpu_count() or 1
