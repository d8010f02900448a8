"""The paged metadata of one model step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from ..pallas_kernels import SharedPrefixes


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_tables", "context_lens", "query_start", "slots", "logit_rows", "prefixes"],
    meta_fields=["max_query_len", "batch_invariant"],
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
        prefixes: with one query per sequence, leading blocks that several share, from
            `shared_prefixes`: attention reads them once for all. None to read each on its own.
        batch_invariant: static; whether a token's bits may not depend on the others'.
    """

    block_tables: jax.Array
    context_lens: jax.Array
    query_start: jax.Array
    slots: jax.Array
    logit_rows: jax.Array
    max_query_len: int
    prefixes: SharedPrefixes | None = None
    batch_invariant: bool = False


def packed_batch(
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
) -> tuple[PagedBatch, jax.Array]:
    """The metadata of a step that computes the last tokens of each sequence, packed.

    Args:
        block_tables: `int32[S, M]` with room for the step's tokens.
        context_lens: `int32[S]`, the step's own tokens included; 0 for an unused row.
        query_lens: `int32[S]` tokens of each sequence in this step; 0 for an unused row.
        num_tokens: T, static; what exceeds the sum of the query lengths is padding.
        block_size: slots per block.

    Returns:
        `(batch, positions int32[T])`; the batch asks for the logits of each sequence's last token.
    """
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_lens, dtype=jnp.int32)])
    seq, position, live = token_positions(context_lens, start, num_tokens)
    batch = PagedBatch(
        block_tables=block_tables,
        context_lens=context_lens,
        query_start=start,
        slots=token_slots(block_tables, seq, position, live, block_size),
        logit_rows=jnp.maximum(start[1:] - 1, 0),
        max_query_len=num_tokens,
    )
    return batch, position


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
