"""What a block is called below the device: a digest of all that its keys and values depend on.

>>> root = root_key(NamespaceKey(model="m", cache_dtype="float32"), "4 layers")
>>> keys = further_keys([], root, np.arange(10, dtype=np.int32), block_size=4)
>>> len(keys), keys[0] == keys[1]
(2, False)
>>> keys[1:] == further_keys(keys[:1], root, np.arange(10, dtype=np.int32), block_size=4)
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from ..namespace import NamespaceKey

KEY_BYTES = 32
# Another one for another meaning of the bytes below.
_PERSON = b"octavo-blocks-1"


def root_key(namespace: NamespaceKey, payload: str, salt: bytes = b"") -> bytes:
    """What stands before the first block of a namespace.

    Args:
        namespace: whose blocks they are.
        payload: how their bytes are to be read, and by what they were computed.
        salt: anything else that must be equal.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON)
    # Each field with its length before it, so that no choice of fields imitates another.
    for part in (*(field.encode() for field in astuple(namespace)), payload.encode(), salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def further_keys(
    known: Sequence[bytes], root: bytes, tokens: np.ndarray, block_size: int
) -> list[bytes]:
    """The keys of the full blocks of `tokens: int32[n]` after those that are known."""
    first, full = len(known), len(tokens) // block_size
    rest = np.asarray(tokens[first * block_size : full * block_size], "<i4").tobytes()
    num_bytes = 4 * block_size
    keys, parent = [], known[-1] if known else root
    # A long prompt waits for this: a copy is made in half the time of a new digest.
    empty = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON)
    for start in range(0, len(rest), num_bytes):
        digest = empty.copy()
        digest.update(parent + rest[start : start + num_bytes])
        parent = digest.digest()
        keys.append(parent)
    return keys
