"""What was evicted lately, when and for whom: a ring of records, read by `explain`."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .index import PrefixIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class History:
    """The last R evictions.

    Attributes:
        hash: `uint32[R]` chain hash of the block, which covers its whole prefix.
        tokens: `int32[R, B]`.
        num_tokens: `int32[R]`; 0 for a record not yet written.
        namespace: `int32[R]`.
        time: `int32[R]` the caller's time.
        owner: `int32[R]` for whom room was made.
        next: `int32[]` where the next record goes.
    """

    hash: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    namespace: jax.Array
    time: jax.Array
    owner: jax.Array
    next: jax.Array


def init_history(history_len: int, block_size: int) -> History:
    """No evictions yet, room for `history_len` of them."""
    if history_len < 0:
        raise ValueError(f"{history_len=} must not be negative")

    def zeros(dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return jnp.zeros(history_len, dtype)

    return History(
        hash=zeros(jnp.uint32),
        tokens=jnp.zeros((history_len, block_size), jnp.int32),
        num_tokens=zeros(),
        namespace=zeros(),
        time=zeros(),
        owner=zeros(),
        next=jnp.int32(0),
    )


def record_evictions(
    history: History, index: PrefixIndex, victims: jax.Array, time: jax.Array, owner: jax.Array
) -> History:
    """Note that `victims: int32[n]`, null ones last, leave the index (as it was before)."""
    length = history.hash.shape[0]
    if not length:
        return history
    live = victims != NULL_BLOCK
    total = jnp.sum(live, dtype=jnp.int32)
    position = jnp.arange(victims.shape[0], dtype=jnp.int32)
    # Of more victims than records only the last are kept.
    kept = live & (position >= total - length)
    target = jnp.where(kept, (history.next + position) % length, length)

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[target].set(value, mode="drop")

    return History(
        hash=put(history.hash, index.hash[victims]),
        tokens=put(history.tokens, index.tokens[victims]),
        num_tokens=put(history.num_tokens, index.num_tokens[victims]),
        namespace=put(history.namespace, index.namespace[victims]),
        time=put(history.time, jnp.broadcast_to(time, victims.shape)),
        owner=put(history.owner, jnp.broadcast_to(owner, victims.shape)),
        next=(history.next + total) % length,
    )
