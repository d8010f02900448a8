"""The paged metadata of one model step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_tables", "context_lens", "query_start", "slots", "logit_rows"],
    meta_fields=["max_query_len"],
)
@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """Which blocks, slots and queries belong to which sequence in one step.

    Attributes:
        block_tables: `int32[S, M]`.
        context_lens: `int32[S]`, the step's own tokens included; 0 for an unused row.
        query_start: `int32[S+1]`; sequence s owns tokens `query_start[s]:query_start[s+1]`.
        slots: `int32[T]` where each token's key and value go; 0 for padding.
        logit_rows: `int32[R]` tokens whose logits are wanted.
        max_query_len: static bound on the queries of one sequence.
    """

    block_tables: jax.Array
    context_lens: jax.Array
    query_start: jax.Array
    slots: jax.Array
    logit_rows: jax.Array
    max_query_len: int


def token_positions(
    context_lens: jax.Array, query_start: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Owner, position and liveness of each packed token.

    Args:
        context_lens: `int32[S]`, the step's own tokens included.
        query_start: `int32[S+1]`.
        num_tokens: T, static.

    Returns:
        `(seq int32[T], position int32[T], live bool[T])`; padding tokens are not live and have
        seq 0 and position 0.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    live = seq < context_lens.shape[0]
    seq = jnp.where(live, seq, 0)
    position = context_lens[seq] - (query_start[seq + 1] - token)
    return seq, jnp.where(live, position, 0), live


def token_slots(
    block_tables: jax.Array,
    seq: jax.Array,
    position: jax.Array,
    live: jax.Array,
    block_size: int,
) -> jax.Array:
    """The slot `int32[T]` of each token, 0 (padding) where it is not live or has no column."""
    column = position // block_size
    live &= (column >= 0) & (column < block_tables.shape[1])
    block = block_tables[seq, jnp.where(live, column, 0)]
    return jnp.where(live, block * block_size + position % block_size, 0)
