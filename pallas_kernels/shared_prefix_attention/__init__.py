"""Decode attention that reads a prefix common to several sequences once for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..chips import current_platform
from ..dispatch import NUMBA
from ..layout import NULL_BLOCK, check_cache, check_index_dtype, debug_check_block_ids
from ..merge_states import merge_states
from ..paged_attention import paged_attention
from ..paged_attention.arguments import AttentionOptions
from ..paged_attention.numba import paged_attention_numba


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
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decode attention with one query per sequence; equal to `paged_attention` but for rounding.

    The queries of a group attend to its shared blocks as one tile, so that these are read once
    per group and not once per sequence; each query then attends to the rest of its own context,
    and the two states are merged. It pays where the reads that it saves outweigh a second pass
    over the queries: many sequences, a long prefix. With "numba" both are one call, which takes
    whole spans of the shared blocks (256 tokens) and puts all spans together in one order: not one
    bit differs from `paged_attention`.

    Args:
        q: `[S, N, H]`.
        kv_cache: `[P, K, B, ROW]`.
        block_tables: `int32[S, M]`.
        context_lens: `int32[S]`; 0 for an unused row, be it in a group or not.
        prefixes: who shares what. Every shared block must be full and in all members' tables at
            the same columns.
        scale, soft_cap, sinks, k_scale, v_scale, implementation: as for `paged_attention`.
        batch_invariant: as for `paged_attention`; but for "numba" it leaves nothing to share.

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
        "batch_invariant": batch_invariant,
        "implementation": implementation,
    }
    args = q, kv_cache, block_tables, context_lens
    query_start = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    try:
        if implementation == NUMBA or (implementation is None and current_platform() == "cpu"):
            return _in_one_call(*args, query_start, sinks, prefixes, options)
    except NotImplementedError:
        if implementation == NUMBA:
            raise
    if batch_invariant:
        return paged_attention(*args, query_start, max_query_len=1, sinks=sinks, **options)
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
        query_start,
        max_query_len=1,
        sinks=sinks,
        **options,
    )
    prefix_lse = jnp.where(context_lens[:, None] > 0, prefix_lse[back], -jnp.inf)
    return merge_states(prefix_out[back], prefix_lse, out, lse)


def _in_one_call(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    sinks: jax.Array | None,
    prefixes: SharedPrefixes,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    num_kv_heads = kv_cache.shape[1] if kv_cache.ndim == 4 else 0
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape=} must have a multiple of the KV heads of {kv_cache.shape=}")
    check_cache(kv_cache, num_kv_heads, q.shape[2])
    if block_tables.ndim != 2 or block_tables.shape[0] != q.shape[0]:
        raise ValueError(f"{block_tables.shape=} must be [S, M], S={q.shape[0]}")
    check_index_dtype(block_tables=block_tables, context_lens=context_lens)
    if options["k_scale"] is not None or options["v_scale"] is not None:
        raise NotImplementedError("k_scale and v_scale are not supported")
    if not q.shape[0]:
        return jnp.zeros_like(q), jnp.zeros((0, q.shape[1]), jnp.float32)
    first_position = jnp.arange(block_tables.shape[1], dtype=jnp.int32) * kv_cache.shape[2]
    debug_check_block_ids(
        block_tables, first_position[None, :] < context_lens[:, None], kv_cache.shape[0]
    )
    resolved = AttentionOptions(
        max_query_len=1,
        scale=1 / math.sqrt(q.shape[2]) if options["scale"] is None else options["scale"],
        sliding_window=None,
        soft_cap=options["soft_cap"],
    )
    lists = block_tables, context_lens, query_start
    names = ("order", "group_start", "leader", "group_blocks", "num_blocks")
    own = [getattr(prefixes, name) for name in names]
    return paged_attention_numba(q, kv_cache, *lists, sinks, resolved, own)
