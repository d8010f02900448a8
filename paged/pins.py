"""Pins: hot prefixes that eviction leaves alone, within a budget and for a time.

The budget is counted in blocks, so pins can never take the whole pool; with a budget of P - 1 less
the longest sequence's blocks, every sequence can still be admitted once the others are released.
A pinned block's ancestors are pinned at least as long. Pinning again prolongs and never shortens.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK
from .index import PrefixIndex, match
from .state import FOREVER, CacheState
from .tables import BlockTables


def pin_tokens(
    state: CacheState,
    tokens: jax.Array,
    num_tokens: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
    until: jax.typing.ArrayLike = FOREVER,
) -> tuple[CacheState, jax.Array, jax.Array]:
    """Pin the cached full blocks at the start of a token sequence.

    Args:
        state: the manager.
        tokens: `int32[n, B]`.
        num_tokens: `int32[]`.
        namespace: `int32[]`.
        until: `int32[]` time at which the pin ends, in the unit of `state.now`.

    Returns:
        `(state, num_pinned int32[], ok bool[])`: blocks that are now pinned; over the budget `ok`
        is False, nothing is pinned and nothing changes.
    """
    blocks = jnp.asarray(num_tokens, jnp.int32) // state.index.block_size
    path, _ = match(state.index, tokens, blocks, namespace)
    return _pin(state, _mask(state.index, path), until)


def pin_sequence(
    state: CacheState,
    tables: BlockTables,
    seat: jax.typing.ArrayLike,
    until: jax.typing.ArrayLike = FOREVER,
) -> tuple[CacheState, jax.Array, jax.Array]:
    """Pin the indexed blocks of a running sequence; results as of `pin_tokens`.

    `ok` is False as well if `seat: int32[]` is out of range or empty.
    """
    seat = jnp.asarray(seat, jnp.int32)
    num_seqs = tables.num_blocks.shape[0]
    row = jnp.clip(seat, 0, num_seqs - 1)
    used = (seat >= 0) & (seat < num_seqs) & (tables.num_blocks[row] > 0)
    blocks = jnp.where(used, tables.block_ids[row], NULL_BLOCK)
    state, count, ok = _pin(state, _mask(state.index, blocks), until)
    return state, count, ok & used


def pin_namespace(
    state: CacheState,
    namespace: jax.typing.ArrayLike,
    until: jax.typing.ArrayLike = FOREVER,
) -> tuple[CacheState, jax.Array, jax.Array]:
    """Pin every block that is indexed now in a namespace `int32[]`; results as of `pin_tokens`."""
    return _pin(state, state.index.indexed & (state.index.namespace == namespace), until)


def unpin_tokens(
    state: CacheState,
    tokens: jax.Array,
    num_tokens: jax.typing.ArrayLike,
    namespace: jax.typing.ArrayLike,
) -> CacheState:
    """End the pins of the cached full blocks at the start of a token sequence.

    Blocks under which others are pinned stay pinned as long as those.
    """
    blocks = jnp.asarray(num_tokens, jnp.int32) // state.index.block_size
    path, _ = match(state.index, tokens, blocks, namespace)
    return _unpin(state, _mask(state.index, path))


def unpin_namespace(state: CacheState, namespace: jax.typing.ArrayLike) -> CacheState:
    """End all pins of a namespace `int32[]`."""
    return _unpin(state, state.index.namespace == namespace)


def _mask(index: PrefixIndex, block_ids: jax.Array) -> jax.Array:
    chosen = jnp.zeros_like(index.indexed).at[block_ids].set(True)
    return chosen & index.indexed


def _pin(
    state: CacheState, blocks: jax.Array, until: jax.typing.ArrayLike
) -> tuple[CacheState, jax.Array, jax.Array]:
    index = state.index
    until = jnp.asarray(until, jnp.int32)
    pinned = jnp.where(blocks, jnp.maximum(index.pin_until, until), index.pin_until)
    ok = jnp.sum(index.indexed & (pinned > state.now), dtype=jnp.int32) <= state.pin_budget
    count = jnp.where(ok, jnp.sum(blocks & (pinned > state.now), dtype=jnp.int32), 0)
    index = replace(index, pin_until=jnp.where(ok, pinned, index.pin_until))
    return replace(state, index=index), count, ok


def _unpin(state: CacheState, blocks: jax.Array) -> CacheState:
    index = state.index
    kept = jnp.where(blocks | ~index.indexed, 0, index.pin_until)

    # Up the tree by distances 1, 2, 4, ...: after each round a block knows of the pins of all its
    # descendants up to that distance.
    def spread(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ancestor, until = carry
        until = until.at[ancestor].max(until)
        return ancestor[ancestor], until

    ancestor = jnp.where(index.indexed, index.parent, NULL_BLOCK)
    rounds = max(index.num_tokens.shape[0] - 1, 1).bit_length()
    _, kept = jax.lax.fori_loop(0, rounds, lambda _, carry: spread(carry), (ancestor, kept))
    kept = kept.at[NULL_BLOCK].set(0)
    return replace(state, index=replace(index, pin_until=kept))
