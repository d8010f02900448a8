"""Hashes that nominate blocks: cheap, vectorised, and never trusted.

The hash of a block extends its parent's, `h_i = A * h_(i-1) + d_i (mod 2^32)`, with A odd and d_i
a digest of the block's own tokens. Being linear in the parent, all hashes of a prompt come from
one cumulative sum. Tokens and parents decide; a collision costs time only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF


def root_hash(namespace: jax.typing.ArrayLike) -> jax.Array:
    """Hash `uint32[...]` that stands before the first block of a namespace `int32[...]`."""
    return _mix(jnp.asarray(namespace, jnp.int32).astype(jnp.uint32) + jnp.uint32(1))


def extend_hash(parent_hash: jax.Array, tokens: jax.Array) -> jax.Array:
    """Hash `uint32[...]` of a block of `tokens: int32[..., B]` under its parent's hash."""
    return parent_hash * jnp.uint32(_MULTIPLIER) + _digest(tokens)


def extend_hashes(base: jax.Array, tokens: jax.Array, follows: jax.Array) -> jax.Array:
    """Hashes `uint32[n]` of blocks of which some follow the one before them in the list.

    Args:
        base: `uint32[n]` hash of the block's parent; not read where it follows.
        tokens: `int32[n, B]`.
        follows: `bool[n]`; the parent is the entry before.
    """
    digest = _digest(tokens)
    scale = jnp.where(follows, jnp.uint32(_MULTIPLIER), jnp.uint32(0))
    offset = jnp.where(follows, digest, base * jnp.uint32(_MULTIPLIER) + digest)

    def compose(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]):
        return first[0] * then[0], first[1] * then[0] + then[1]

    return jax.lax.associative_scan(compose, (scale, offset))[1]


def partial_hash(block_hash: jax.Array, num_missing: jax.Array) -> jax.Array:
    """Hash `uint32[...]` of a block padded with `num_missing: int32[...]` tokens, 0 if it is full.

    Without it a block that ends would have the hash of one that goes on with zeros.
    """
    return block_hash + _mix(num_missing.astype(jnp.uint32))


def child_key(parent: jax.Array, namespace: jax.Array, first_token: jax.Array) -> jax.Array:
    """Key `uint32[...]` shared by the children of a block that begin with the same token."""
    key = _mix(namespace.astype(jnp.uint32) * jnp.uint32(_MULTIPLIER) + parent.astype(jnp.uint32))
    return _mix(key * jnp.uint32(_MULTIPLIER) + first_token.astype(jnp.uint32))


def chain_hashes(tokens: jax.Array, namespace: jax.typing.ArrayLike) -> jax.Array:
    """Hashes `uint32[n]` of consecutive blocks `tokens: int32[n, B]` from the root on."""
    count = tokens.shape[0]
    powers, inverses = (
        _powers(_MULTIPLIER, count + 1),
        _powers(pow(_MULTIPLIER, -1, 1 << 32), count),
    )
    terms = _digest(tokens) * jnp.asarray(inverses)
    total = jnp.cumsum(terms, dtype=jnp.uint32) + root_hash(namespace) * jnp.uint32(_MULTIPLIER)
    return total * jnp.asarray(powers[:count])


def bucket_of(hashes: jax.Array, num_buckets: int) -> jax.Array:
    """Bucket `int32[...]` of each hash `uint32[...]`; `num_buckets` is a power of two."""
    return (_mix(hashes) & jnp.uint32(num_buckets - 1)).astype(jnp.int32)


def _digest(tokens: jax.Array) -> jax.Array:
    place = np.arange(1, tokens.shape[-1] + 1, dtype=np.uint64)
    odd = jnp.asarray(((place * 0x85EBCA6B) & _MASK | 1).astype(np.uint32))
    mixed = _mix(tokens.astype(jnp.uint32) * odd + odd)
    return _mix(jnp.sum(mixed * odd, axis=-1, dtype=jnp.uint32))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _powers(base: int, count: int) -> np.ndarray:
    values, power = [], 1
    for _ in range(count):
        values.append(power)
        power = power * base & _MASK
    return np.array(values, np.uint32)
