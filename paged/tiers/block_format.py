"""One block as bytes, in a file or in a store: believed only after all of it has been checked.

A header (below), the tokens as little-endian int32, the payload.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from .keys import KEY_BYTES

VERSION = 1
_MAGIC = b"octavoKV"
# Magic, version, tokens, bytes of payload, key, CRC-32 of all that is not in the header, and of
# the header so far.
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}sII")
HEADER_BYTES = _HEADER.size


class BadBlock(Exception):
    """Bytes that are not what their name says; the message says why."""


def num_bytes(block_size: int, block_bytes: int) -> int:
    """Size of a block as bytes."""
    return HEADER_BYTES + 4 * block_size + block_bytes


def encoded(key: bytes, tokens: np.ndarray, payload: np.ndarray) -> tuple[bytes, bytes, memoryview]:
    """A block's bytes in three parts: header, tokens, payload."""
    stored = np.ascontiguousarray(tokens, "<i4").tobytes()
    return _header(key, stored, payload.data), stored, payload.data


def check_size(size: int, tokens: np.ndarray, out: np.ndarray) -> None:
    """Raise BadBlock unless a block of these tokens and this payload has so many bytes."""
    if size != (expected := num_bytes(len(tokens), len(out))):
        raise BadBlock(f"it has {size} bytes, not {expected}")


def check(
    header: bytes | bytearray | memoryview,
    stored: bytes | bytearray | memoryview,
    payload: memoryview,
    key: bytes,
    tokens: np.ndarray,
) -> None:
    """Raise BadBlock unless the three parts are those of exactly this block."""
    magic, version, *_ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise BadBlock("it does not begin like a block")
    if version != VERSION:
        raise BadBlock(f"it is of version {version}, not {VERSION}")
    if stored != np.ascontiguousarray(tokens, "<i4").tobytes():
        raise BadBlock("its tokens are others")
    if header != _header(key, stored, payload):
        raise BadBlock("its key or a checksum is wrong")


def decode(data: bytes, key: bytes, tokens: np.ndarray, out: np.ndarray) -> None:
    """Fill `out: uint8[block_bytes]` with the payload of exactly this block, or raise BadBlock."""
    check_size(len(data), tokens, out)
    view, end = memoryview(data), len(data) - len(out)
    check(view[:HEADER_BYTES], view[HEADER_BYTES:end], view[end:], key, tokens)
    out[:] = np.frombuffer(data, np.uint8, offset=end)


def _header(key: bytes, stored: bytes | bytearray | memoryview, payload: memoryview) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(stored))
    packed = _HEADER.pack(_MAGIC, VERSION, len(stored) // 4, len(payload), key, crc, 0)[:-4]
    return packed + struct.pack("<I", zlib.crc32(packed))
