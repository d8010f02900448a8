"""One block as a file: written whole or not at all.

A file is written under another name and then renamed, so a process that is killed leaves whole
files and scraps with the other name. Nothing is fsynced: after a power cut a file may have its name
and not its bytes, and is then found out like any damaged one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import numpy as np

from .block_format import HEADER_BYTES, BadBlock, check, check_size, encoded

SUFFIX, SCRAP_SUFFIX = ".kv", ".tmp"


def write_block(path: Path, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
    """Write the block's file, or raise OSError and leave nothing behind."""
    scrap = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{SCRAP_SUFFIX}")
    try:
        with open(scrap, "xb") as file:
            for part in encoded(key, tokens, payload):
                file.write(part)
        os.replace(scrap, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scrap.unlink()
        raise


def read_block(path: Path, key: bytes, tokens: np.ndarray, out: np.ndarray) -> None:
    """Fill `out: uint8[block_bytes]` with the payload of exactly this block.

    Raises:
        BadBlock: it is damaged, of another version, or another block.
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        # The size first: what is read below then has a bound.
        check_size(os.fstat(file.fileno()).st_size, tokens, out)
        header, stored = bytearray(HEADER_BYTES), bytearray(4 * len(tokens))
        _fill(file.fileno(), [memoryview(header), memoryview(stored), out.data])
    check(header, stored, out.data, key, tokens)


def _fill(descriptor: int, views: list[memoryview]) -> None:
    # All in one call, so that the system fetches the file in one piece.
    while views:
        count = os.readv(descriptor, views)
        if not count:
            raise BadBlock("it became shorter while it was read")
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
