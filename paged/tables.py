"""Block tables: which blocks hold the positions of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..pallas_kernels import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The tables of all sequences; row s is the sequence in seat s.

    Attributes:
        block_ids: `int32[S, M]`; entries past `num_blocks` are the null block.
        num_blocks: `int32[S]` blocks that each sequence holds; 0 for an empty row.
        priority: `int32[S]` retention priority of the sequence's blocks; higher stays longer.
    """

    block_ids: jax.Array
    num_blocks: jax.Array
    priority: jax.Array


def init_tables(num_seqs: int, blocks_per_seq: int) -> BlockTables:
    """Empty tables for `num_seqs` sequences of up to `blocks_per_seq` blocks."""
    if num_seqs < 1 or blocks_per_seq < 1:
        raise ValueError(f"{num_seqs=} and {blocks_per_seq=} must be at least 1")
    return BlockTables(
        block_ids=jnp.full((num_seqs, blocks_per_seq), NULL_BLOCK, jnp.int32),
        num_blocks=jnp.zeros(num_seqs, jnp.int32),
        priority=jnp.zeros(num_seqs, jnp.int32),
    )


def blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks `int32[...]` that hold `num_tokens: int32[...]`, without overflow for the largest."""
    return (jnp.maximum(num_tokens, 1) - 1) // block_size + (num_tokens > 0).astype(jnp.int32)
