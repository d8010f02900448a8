"""The attention call of a layer: with shared prefixes named, a leader's blocks serve the group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.paged import PagedBatch, cached_attention, shared_prefixes, token_slots
from octavo.pallas_kernels import row_width

# On a CPU whole spans are shared, of 256 tokens: the first 32 blocks.
SHARED = 32
S, M, B, K, G, H = 3, SHARED + 2, 8, 2, 2, 16
LENS = np.array([265, 262, 270], np.int32)  # this step's token included


def decode_batch(tables: jax.Array, named: bool) -> PagedBatch:
    lens, row = jnp.asarray(LENS), jnp.arange(S, dtype=jnp.int32)
    return PagedBatch(
        block_tables=tables,
        context_lens=lens,
        query_start=jnp.arange(S + 1, dtype=jnp.int32),
        slots=token_slots(tables, row, lens - 1, lens > 0, B),
        logit_rows=row,
        max_query_len=1,
        prefixes=shared_prefixes(tables, lens, B) if named else None,
    )


@pytest.fixture
def step() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    tables = 1 + np.arange(S * M, dtype=np.int32).reshape(S, M)
    tables[:, :SHARED] = tables[0, :SHARED]
    width = row_width(H, jax.default_backend())
    cache = jnp.asarray(rng.normal(size=(S * M + 1, K, B, width)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(S, K * G, H)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, S, K, H)), jnp.float32)
    return q, k, v, cache, jnp.asarray(tables)


def test_shared_prefixes_change_nothing_but_who_reads_them(step: tuple[jax.Array, ...]) -> None:
    q, k, v, cache, tables = step
    plain, written = cached_attention(q, k, v, cache, decode_batch(tables, False))
    batch = decode_batch(tables, True)
    shared, again = cached_attention(q, k, v, cache, batch)
    np.testing.assert_allclose(shared, plain, atol=2e-6)
    np.testing.assert_array_equal(written, again)
    # Members' own entries for the shared columns are not looked at: the leader's are.
    other = tables.at[1:, :SHARED].set(5)
    hidden = PagedBatch(**{**vars(batch), "block_tables": other})
    np.testing.assert_array_equal(cached_attention(q, k, v, cache, hidden)[0], shared)


def test_a_sliding_window_reads_each_context_on_its_own(step: tuple[jax.Array, ...]) -> None:
    q, k, v, cache, tables = step
    plain, named = (
        cached_attention(q, k, v, cache, decode_batch(tables, named), sliding_window=9)[0]
        for named in (False, True)
    )
    np.testing.assert_array_equal(plain, named)
