"""Finding the sequences of a batch that share leading blocks, from their block tables alone.

Reference counts do not tell: they count forks, transfers and pins as well, and not who holds what.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..pallas_kernels import SharedPrefixes


def shared_prefixes(
    block_tables: jax.Array,
    context_lens: jax.Array,
    block_size: int,
    *,
    min_saved_blocks: int = 1,
) -> SharedPrefixes:
    """Group the sequences of a decode batch by the leading blocks they share.

    A group with n members that share d blocks saves `(n - 1) * d` block reads. Groups are taken
    greedily: the first sequence that is in none leads the next, with as many of the others and
    as many blocks as save most. A shared block is full in every member, and at least one slot
    of every context is left to its own pass.

    Args:
        block_tables: `int32[S, M]`; entries past a context may hold anything.
        context_lens: `int32[S]`; 0 for an unused row.
        block_size: slots per block.
        min_saved_blocks: static; a group that saves fewer is left alone.

    Returns:
        `SharedPrefixes`, for `octavo.pallas_kernels.shared_prefix_attention`. Cost: a comparison
        of all tables with each leader's, `O(S * M)` per sequence whose first block is not its own.

    Raises:
        ValueError: shapes do not fit together, or a size is not positive.
    """
    if block_tables.ndim != 2 or context_lens.shape != block_tables.shape[:1]:
        raise ValueError(f"{block_tables.shape=} must be [S, M] and {context_lens.shape=} [S]")
    if block_size < 1 or min_saved_blocks < 1:
        raise ValueError(f"{block_size=} and {min_saved_blocks=} must be at least 1")
    num_seqs, table_len = block_tables.shape
    seq = jnp.arange(num_seqs, dtype=jnp.int32)
    column = jnp.arange(table_len, dtype=jnp.int32)
    full = jnp.maximum(context_lens - 1, 0) // block_size

    def shared_with(leader: jax.Array) -> jax.Array:
        """Leading blocks `int32[S]` that each sequence shares with one of them."""
        same = (block_tables == block_tables[leader]) & (column < full[:, None])
        same &= column < full[leader]
        return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def open_group(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group_of, num_groups, waiting, leaders, group_blocks = state
        leader = jnp.argmax(waiting).astype(jnp.int32)
        depth = jnp.where(waiting, shared_with(leader), 0)
        by_depth = -jnp.sort(-jnp.where(seq == leader, table_len + 1, depth))
        # With the k deepest others: k reads of the shallowest's depth are saved.
        saved = jnp.where(seq > 0, seq * by_depth, 0)
        best = jnp.argmax(saved)
        found = saved[best] >= min_saved_blocks
        blocks = jnp.where(found, by_depth[best], 0)
        joins = found & waiting & ((depth >= blocks) | (seq == leader))
        return (
            jnp.where(joins, num_groups, group_of),
            num_groups + found.astype(jnp.int32),
            waiting & ~joins & (seq != leader),
            leaders.at[num_groups].set(jnp.where(found, leader, leaders[num_groups]), mode="drop"),
            group_blocks.at[num_groups].set(blocks, mode="drop"),
        )

    # Who shares not even its first block need not be compared with anyone.
    first = jnp.where(full > 0, block_tables[:, 0], -1 - seq)
    ordered = jnp.sort(first)
    count = jnp.searchsorted(ordered, first, side="right") - jnp.searchsorted(ordered, first)
    none = jnp.full(num_seqs, num_seqs, jnp.int32)
    state = (none, jnp.int32(0), count > 1, jnp.zeros_like(none), jnp.zeros_like(none))
    group_of, _, _, leaders, group_blocks = jax.lax.while_loop(
        lambda state: jnp.any(state[2]), open_group, state
    )
    order = jnp.argsort(group_of, stable=True).astype(jnp.int32)
    group_start = jnp.searchsorted(group_of[order], jnp.arange(num_seqs + 1, dtype=jnp.int32))
    in_group = group_of < num_seqs
    own = jnp.where(in_group, group_blocks[jnp.minimum(group_of, num_seqs - 1)], 0)
    return SharedPrefixes(
        order=order,
        group_start=group_start.astype(jnp.int32),
        leader=leaders,
        group_blocks=group_blocks,
        num_blocks=own,
    )
