"""Blocks for the tests of tiers: tokens and payload follow from a number."""

from __future__ import annotations

import hashlib

import numpy as np

BLOCK_BYTES, BLOCK_SIZE = 4096, 8
SIZES = {"block_bytes": BLOCK_BYTES, "block_size": BLOCK_SIZE}


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
    found = tier.read(key(number), tokens(number), out)
    assert not found or np.array_equal(out, payload(number))
    return found


def held(tier, *numbers: int) -> list[int]:
    return [number for number in numbers if has(tier, number)]
