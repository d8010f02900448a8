"""Blocks for the tests of tiers: tokens and payload follow from a number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

BLOCK_BYTES, BLOCK_SIZE = 4096, 8
SIZES = {"block_bytes": BLOCK_BYTES, "block_size": BLOCK_SIZE}

# What may become of a block's bytes.
Damage = Callable[[bytearray], object]
DAMAGES: dict[str, Damage] = {
    "truncated": lambda data: data.__delitem__(slice(-1, None)),
    "empty": lambda data: data.clear(),
    "header only": lambda data: data.__delitem__(slice(10, None)),
    "longer": lambda data: data.append(0),
    "zeros": lambda data: data.__setitem__(slice(None), bytes(len(data))),
    "magic": lambda data: data.__setitem__(0, data[0] ^ 1),
    "other version": lambda data: data.__setitem__(8, data[8] + 1),
    "key": lambda data: data.__setitem__(30, data[30] ^ 1),
    "checksum": lambda data: data.__setitem__(56, data[56] ^ 1),
    "tokens": lambda data: data.__setitem__(64, data[64] ^ 1),
    "first byte of payload": lambda data: data.__setitem__(96, data[96] ^ 1),
    "last byte of payload": lambda data: data.__setitem__(-1, data[-1] ^ 1),
}


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def tokens(number: int) -> np.ndarray:
    return np.arange(number, number + BLOCK_SIZE, dtype=np.int32)


def payload(number: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, block_bytes, np.uint8)


def put(tier, *numbers: int) -> None:
    for number in numbers:
        tier.put(key(number), tokens(number), payload(number))
    tier.flush()


def has(tier, number: int) -> bool:
    """Whether a tier gives back a block; what it gives must be right."""
    out = np.zeros(BLOCK_BYTES, np.uint8)
    found = tier.read([key(number)], tokens(number)[None], out[None])
    assert not found or np.array_equal(out, payload(number))
    return found


def held(tier, *numbers: int) -> list[int]:
    return [number for number in numbers if has(tier, number)]
