"""What has been evicted: how often it was used, and when and for whom it went.

A table with one place for each hash, the newest eviction overwriting: it forgets and can be wrong
about a block whose hash collides, so it may inform eviction and explanations and never a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .hashing import bucket_of
from .index import PrefixIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class History:
    """Evicted blocks, each at the place of its hash; R places, a power of two or none.

    Attributes:
        hash: `uint32[R]` chain hash of the block, which covers namespace and whole prefix.
        uses: `float32[R]` as in `PrefixIndex`; -1 where nothing is remembered.
        last_use: `int32[R]` as in `PrefixIndex`.
        time: `int32[R]` the caller's time of the eviction.
        owner: `int32[R]` for whom room was made.
    """

    hash: jax.Array
    uses: jax.Array
    last_use: jax.Array
    time: jax.Array
    owner: jax.Array


def init_history(history_len: int) -> History:
    """A table of at least `history_len` places, none for 0."""
    if history_len < 0:
        raise ValueError(f"{history_len=} must not be negative")
    places = 1 << (history_len - 1).bit_length() if history_len else 0
    return History(
        hash=jnp.zeros(places, jnp.uint32),
        uses=jnp.full(places, -1, jnp.float32),
        last_use=jnp.zeros(places, jnp.int32),
        time=jnp.zeros(places, jnp.int32),
        owner=jnp.zeros(places, jnp.int32),
    )


def record_evictions(
    history: History, index: PrefixIndex, victims: jax.Array, time: jax.Array, owner: jax.Array
) -> History:
    """Note that `victims: int32[n]` leave the index (as it is before); null ones are padding."""
    places = history.hash.shape[0]
    if not places:
        return history
    hashes = index.hash[victims]
    live = victims != NULL_BLOCK
    place = bucket_of(hashes, places)
    kept = history.hash.at[jnp.where(live, place, places)].set(hashes, mode="drop")
    # Of two victims with one place one has been written: the rest of the record must be its.
    target = jnp.where(live & (kept[place] == hashes), place, places)

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[target].set(jnp.broadcast_to(value, victims.shape), mode="drop")

    return History(
        hash=kept,
        uses=put(history.uses, index.uses[victims]),
        last_use=put(history.last_use, index.last_use[victims]),
        time=put(history.time, time),
        owner=put(history.owner, owner),
    )


def recall(history: History, hashes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places `int32[n]` in the history for hashes `uint32[n]`, and `bool[n]` if they are there."""
    places = history.hash.shape[0]
    if not places:
        return jnp.zeros_like(hashes, jnp.int32), jnp.zeros_like(hashes, bool)
    place = bucket_of(hashes, places)
    return place, (history.hash[place] == hashes) & (history.uses[place] >= 0)
