"""One block as a file: written whole or not at all, and believed only after it has been checked.

A header (below), the tokens as little-endian int32, the payload. A file is written under another
name and then renamed, so a process that is killed leaves whole files and scraps with the other
name. Nothing is fsynced: after a power cut a file may have its name and not its bytes, and is then
found out like any damaged one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import zlib
from pathlib import Path

import numpy as np

from .keys import KEY_BYTES

SUFFIX, SCRAP_SUFFIX = ".kv", ".tmp"
VERSION = 1
_MAGIC = b"octavoKV"
# Magic, version, tokens, bytes of payload, key, CRC-32 of all that is not in the header, and of
# the header so far.
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}sII")


class BadBlock(Exception):
    """A file that is not what its name says; the message says why."""


def file_bytes(block_size: int, block_bytes: int) -> int:
    """Size of a block's file."""
    return _HEADER.size + 4 * block_size + block_bytes


def write_block(path: Path, key: bytes, tokens: np.ndarray, payload: np.ndarray) -> None:
    """Write the block's file, or raise OSError and leave nothing behind."""
    tokens = np.ascontiguousarray(tokens, "<i4")
    scrap = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{SCRAP_SUFFIX}")
    try:
        with open(scrap, "xb") as file:
            file.write(_header(key, tokens, payload))
            file.write(tokens.data)
            file.write(payload.data)
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
        size = os.fstat(file.fileno()).st_size
        if size != file_bytes(len(tokens), len(out)):
            raise BadBlock(f"it has {size} bytes, not {file_bytes(len(tokens), len(out))}")
        header, stored = bytearray(_HEADER.size), np.empty(len(tokens), "<i4")
        for part in (memoryview(header), stored.data, out.data):
            _fill(file, part.cast("B"))
    magic, version, *_ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise BadBlock("it does not begin like a block")
    if version != VERSION:
        raise BadBlock(f"it is of version {version}, not {VERSION}")
    if not np.array_equal(stored, tokens):
        raise BadBlock("its tokens are others")
    if bytes(header) != _header(key, stored, out):
        raise BadBlock("its key or a checksum is wrong")


def _header(key: bytes, tokens: np.ndarray, payload: np.ndarray) -> bytes:
    crc = zlib.crc32(payload.data, zlib.crc32(tokens.data))
    packed = _HEADER.pack(_MAGIC, VERSION, len(tokens), len(payload), key, crc, 0)[:-4]
    return packed + struct.pack("<I", zlib.crc32(packed))


def _fill(file, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise BadBlock("it became shorter while it was read")
        view = view[count:]
