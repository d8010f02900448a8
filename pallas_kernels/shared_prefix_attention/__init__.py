"""Decode attention that reads a prefix common to several sequences once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..layout import NULL_BLOCK, check_index_dtype
from ..merge_states import merge_states
from ..paged_attention import paged_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Which sequences of a batch share which leading blocks: see `octavo.paged.shared_prefixes`.

    Attributes:
        order: `int32[S]` sequences, the members of a group side by side, those of none last.
        group_start: `int32[S+1]` group g has the members `order[group_start[g]:group_start[g+1]]`;
            groups that are not in use are empty and come last.
        leader: `int32[S]` a member of each group, whose table names the group's shared blocks.
        group_blocks: `int32[S]` blocks that all members of a group share; 0 if not in use.
        num_blocks: `int32[S]` blocks that each sequence shares with its group; 0 if in none.
    """

    order: jax.Array
    group_start: jax.Array
    leader: jax.Array
    group_blocks: jax.Array
    num_blocks: jax.Array


def shared_prefix_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    prefixes: SharedPrefixes,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decode attention with one query per sequence; equal to `paged_attention` but for rounding.

    The queries of a group attend to its shared blocks as one tile, so that these are read once
    per group and not once per sequence; each query then attends to the rest of its own context,
    and the two states are merged. It pays where the reads that it saves outweigh a second pass
    over the queries: many sequences, a long prefix.

    Args:
        q: `[S, N, H]`.
        kv_cache: `[P, K, B, ROW]`.
        block_tables: `int32[S, M]`.
        context_lens: `int32[S]`; 0 for an unused row, be it in a group or not.
        prefixes: who shares what. Every shared block must be full and in all members' tables at
            the same columns.
        scale, soft_cap, sinks, k_scale, v_scale, implementation: as for `paged_attention`.

    Returns:
        `(out [S, N, H], lse float32[S, N])`, as `paged_attention` with `max_query_len=1`.

    Raises:
        ValueError: shapes, dtypes or static options do not fit together.
        NotImplementedError: the named implementation cannot serve this call.

    Source: Hydragen (arXiv:2402.05099) and cascade inference (arXiv:2501.01005, section 3.1.2).
    """
    if q.ndim != 3 or context_lens.shape != q.shape[:1]:
        raise ValueError(f"{q.shape=} must be [S, N, H] and {context_lens.shape=} [S]")
    num_seqs = q.shape[0]
    for name, length in (
        ("order", num_seqs),
        ("group_start", num_seqs + 1),
        ("leader", num_seqs),
        ("group_blocks", num_seqs),
        ("num_blocks", num_seqs),
    ):
        array = getattr(prefixes, name)
        check_index_dtype(**{f"prefixes.{name}": array})
        if array.shape != (length,):
            raise ValueError(f"prefixes.{name} has shape {array.shape}, expected ({length},)")

    options = {
        "scale": scale,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "implementation": implementation,
    }
    block_size, table_len = kv_cache.shape[2], block_tables.shape[1]
    prefix_out, prefix_lse = paged_attention(
        q[prefixes.order],
        kv_cache,
        block_tables[prefixes.leader],
        prefixes.group_blocks * block_size,
        prefixes.group_start,
        causal=False,
        **options,
    )
    back = jnp.argsort(prefixes.order)

    column = jnp.arange(table_len, dtype=jnp.int32) + prefixes.num_blocks[:, None]
    rest = jnp.take_along_axis(block_tables, jnp.minimum(column, table_len - 1), axis=1)
    out, lse = paged_attention(
        q,
        kv_cache,
        jnp.where(column < table_len, rest, NULL_BLOCK),
        jnp.maximum(context_lens - prefixes.num_blocks * block_size, 0),
        jnp.arange(num_seqs + 1, dtype=jnp.int32),
        max_query_len=1,
        sinks=sinks,
        **options,
    )
    prefix_lse = jnp.where(context_lens[:, None] > 0, prefix_lse[back], -jnp.inf)
    return merge_states(prefix_out[back], prefix_lse, out, lse)
