"""What the runner compiles of the block manager, with what else belongs to a seat."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from .. import paged
from ..pallas_kernels import copy_blocks
from .programs import KVCache
from .seats import SeatParams, take_seat


def admit(
    state: paged.CacheState,
    tables: paged.BlockTables,
    history: jax.Array,
    params: SeatParams,
    seat: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    namespace: jax.Array,
    max_cached_tokens: jax.Array,
    resumed: jax.Array,
    own_params: SeatParams,
) -> tuple[paged.CacheState, paged.BlockTables, jax.Array, SeatParams, paged.Admission]:
    """Give a request its seat: blocks, tokens `int32[M, B]` and parameters."""
    # Also if there is no room: then nobody has the seat.
    history = history.at[seat].set(tokens.reshape(-1))
    params = take_seat(params, seat, own_params)
    state, tables, admission = paged.admit(
        state,
        tables,
        seat,
        tokens,
        num_tokens,
        namespace,
        max_cached_tokens=max_cached_tokens,
        resumed=resumed,
    )
    return state, tables, history, params, admission


def append(
    max_new_blocks: int,
    state: paged.CacheState,
    tables: paged.BlockTables,
    num_tokens: jax.Array,
) -> tuple[paged.CacheState, paged.BlockTables, jax.Array]:
    """Grow the tables, as `paged.append`."""
    return paged.append(state, tables, num_tokens, max_new_blocks=max_new_blocks)


def fork(
    state: paged.CacheState,
    tables: paged.BlockTables,
    history: jax.Array,
    params: SeatParams,
    source: jax.Array,
    target: jax.Array,
    enabled: jax.Array,
    seed: jax.Array,
) -> tuple[paged.CacheState, paged.BlockTables, jax.Array, SeatParams, jax.Array]:
    """Let rows `target: int32[n]` go on as rows `source: int32[n]`, each with a seed of its own.

    What the targets held is given back first. Those that are not `enabled: bool[n]` do not count.
    """
    used = enabled & (tables.num_blocks[target] > 0)
    state, tables, _ = paged.release(state, tables, target, enabled=used)
    state, tables, ok = paged.fork(state, tables, source, target, enabled=enabled)
    row = jnp.where(enabled, target, history.shape[0])
    history = history.at[row].set(history[source], mode="drop")
    params = jax.tree.map(lambda x: x.at[row].set(x[source], mode="drop"), params)
    seeds = jnp.asarray(params.seed).at[row].set(seed, mode="drop")
    return state, tables, history, replace(params, seed=seeds), ok


def hold(
    state: paged.CacheState,
    tables: paged.BlockTables,
    source: jax.Array,
    target: jax.Array,
    num_tokens: jax.Array,
) -> tuple[paged.CacheState, paged.BlockTables, jax.Array]:
    """Let the empty row `target: int32[]` hold the first tokens of row `source: int32[]`."""
    state, tables, forked = paged.fork(state, tables, source, target)
    state, tables, cut = paged.truncate(state, tables, target, num_tokens)
    return state, tables, forked & cut


def copy_on_write(
    state: paged.CacheState,
    tables: paged.BlockTables,
    seats: jax.Array,
    positions: jax.Array,
    enabled: jax.Array,
) -> tuple[paged.CacheState, paged.BlockTables, paged.BlockCopies, jax.Array]:
    """See `octavo.paged.copy_on_write`."""
    return paged.copy_on_write(state, tables, seats, positions, enabled=enabled)


def copy(kv_cache: KVCache, copies: paged.BlockCopies) -> KVCache:
    """Copy one block, `int32[]`, or several, `int32[n]`, in every layer."""
    source, target = jnp.atleast_1d(copies.source), jnp.atleast_1d(copies.target)
    return tuple(copy_blocks(layer, source, target) for layer in kv_cache)
