"""Cascade attention against `paged_attention`, and that shared blocks are read once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.paged import shared_prefixes
from octavo.pallas_kernels import paged_attention, row_width, shared_prefix_attention
from octavo.pallas_kernels.paged_attention.numba_decode import blocks_of_span

from .implementations import H200, NUMBA, V6E, XLA, Implementation, params

K, G, H, B = 2, 2, 64, 16
# Context lengths, and how many leading blocks sequence s has in common with sequence t < s.
CASES: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, int]]]] = {
    "all-share": ((90, 70, 65, 200), {1: (0, 4), 2: (0, 4), 3: (0, 4)}),
    "two-groups": ((90, 70, 65, 200, 130), {1: (0, 4), 3: (2, 3), 4: (2, 3)}),
    "none": ((90, 70, 0, 16), {}),
    "some-unused": ((0, 90, 0, 95, 1), {3: (1, 5)}),
    "ends-with-the-prefix": ((65, 65, 66), {1: (0, 4), 2: (0, 4)}),
}
QUICK = {XLA: set(CASES), NUMBA: set(CASES), V6E: set(), H200: set()}


def batch(name: str, platform: str) -> tuple[jax.Array, ...]:
    lens, shares = CASES[name]
    rng = np.random.default_rng(3)
    tables = 1 + rng.permutation(len(lens) * 14).astype(np.int32).reshape(len(lens), 14)
    for s, (t, blocks) in shares.items():
        tables[s, :blocks] = tables[t, :blocks]
    cache = np.full((len(lens) * 14 + 1, K, B, row_width(H, platform)), np.nan, np.float32)
    used = {0} | {b for s, n in enumerate(lens) for b in tables[s, : -(-n // B)]}
    cache[sorted(used)] = rng.normal(size=(len(used), *cache.shape[1:]))
    cache[0] = 0
    q = jnp.asarray(rng.normal(size=(len(lens), K * G, H)), jnp.float32)
    return q, jnp.asarray(cache), jnp.asarray(tables), jnp.array(lens, jnp.int32)


def cascade(args: tuple[jax.Array, ...], implementation: Implementation, **options):
    @jax.jit
    def run(q, cache, tables, lens, true_tables):
        prefixes = shared_prefixes(true_tables, lens, B)
        # Only a leader's table may be asked for what its group shares.
        seq = jnp.arange(len(lens), dtype=jnp.int32)
        leads = jnp.isin(seq, jnp.where(prefixes.group_blocks > 0, prefixes.leader, -1))
        column = jnp.arange(tables.shape[1], dtype=jnp.int32)
        shared = prefixes.num_blocks
        if implementation is NUMBA:  # which shares whole spans
            span = blocks_of_span(B, tables.shape[1])
            shared = shared // span * span
        hidden = (column < shared[:, None]) & ~leads[:, None]
        tables = jnp.where(hidden, 10**6, tables)
        name = implementation.name
        return shared_prefix_attention(
            q, cache, tables, lens, prefixes, implementation=name, **options
        )

    with implementation.context():
        return jax.block_until_ready(run(*args, args[2]))


@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0, "scale": 0.2}, {"sinks": True}])
@pytest.mark.parametrize(("implementation", "name"), params(QUICK, CASES))
def test_equals_attention_without_sharing(
    name: str,
    options: dict,
    implementation: Implementation,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("kernel_case", f"shared_prefix_attention, {name}, {implementation}")
    args = batch(name, implementation.platform)
    tolerance = 2e-5
    if implementation.platform == "gpu":
        args = (args[0].astype(jnp.bfloat16), args[1].astype(jnp.bfloat16), *args[2:])
        tolerance = 2e-2
    if options.get("sinks"):
        options = {"sinks": jnp.linspace(-2, 2, K * G)}
    if implementation is NUMBA and options:
        with pytest.raises(NotImplementedError, match="not supported"):
            cascade(args, implementation, **options)
        return
    start = jnp.arange(len(args[3]) + 1, dtype=jnp.int32)
    q, cache, tables, lens = args
    want = paged_attention(
        q, cache, tables, lens, start, max_query_len=1, implementation="reference", **options
    )
    got = cascade(args, implementation, **options)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("num_seqs", "heads", "block_size", "shared_tokens"),
    [(8, (9, 3, 64), 16, 1040), (5, (4, 2, 16), 8, 300), (33, (9, 3, 64), 16, 600)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_with_numba_not_one_bit_depends_on_what_is_shared(
    num_seqs: int,
    heads: tuple[int, int, int],
    block_size: int,
    shared_tokens: int,
    dtype: str,
    tolerance: float,
) -> None:
    rng = np.random.default_rng(num_seqs)
    num_heads, num_kv_heads, head_size = heads
    table_len = 1400 // block_size
    tables = 1 + rng.permutation(num_seqs * table_len).reshape(num_seqs, -1).astype(np.int32)
    tables[1:-1, : shared_tokens // block_size] = tables[0, : shared_tokens // block_size]
    lens = (shared_tokens + 1 + rng.integers(0, 300, num_seqs)).astype(np.int32)
    lens[2], lens[-1] = 0, 17
    shape = (num_seqs * table_len + 1, num_kv_heads, block_size, 2 * head_size)
    q = jnp.asarray(rng.standard_normal((num_seqs, num_heads, head_size)), jnp.float32)
    cache = jnp.asarray(rng.standard_normal(shape), dtype)
    lists = jnp.asarray(tables), jnp.asarray(lens)
    prefixes = jax.jit(shared_prefixes, static_argnums=2)(*lists, block_size)
    assert prefixes.group_blocks[0] >= blocks_of_span(block_size, table_len)
    # A table that nobody needs but for what lies behind the shared spans.
    span = blocks_of_span(block_size, table_len)
    read = np.arange(table_len) >= np.asarray(prefixes.num_blocks)[:, None] // span * span
    read[np.asarray(prefixes.leader)[0]] = True
    own = jnp.where(read, lists[0], 10**6)
    got = shared_prefix_attention(q, cache, own, lists[1], prefixes, implementation="numba")
    start = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    for name, equal in (
        ("numba", np.testing.assert_array_equal),
        ("reference", partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance)),
    ):
        want = paged_attention(q, cache, *lists, start, max_query_len=1, implementation=name)
        for a, b in zip(got, want, strict=True):
            equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", ["order", "group_start", "leader", "group_blocks", "num_blocks"])
@pytest.mark.parametrize("value", [10**6, -(10**6)])
def test_with_numba_lists_that_do_not_fit_together_touch_no_other_memory(
    name: str, value: int
) -> None:
    lens = jnp.full(4, 300, jnp.int32)
    tables = jnp.tile(1 + jnp.arange(20, dtype=jnp.int32), (4, 1))
    prefixes = shared_prefixes(tables, lens, B)
    assert prefixes.group_blocks[0] == 18
    wrong = dataclasses.replace(prefixes, **{name: getattr(prefixes, name) + value})
    q, cache = jnp.ones((4, K * G, H)), jnp.ones((21, K, B, 2 * H))
    for _ in range(20):
        out, _ = shared_prefix_attention(q, cache, tables, lens, wrong, implementation="numba")
    assert out.shape == q.shape
    out, _ = shared_prefix_attention(q, cache, tables, lens, prefixes, implementation="numba")
    np.testing.assert_allclose(out, q, atol=1e-6)


def test_quantised_caches_are_scaled_in_both_passes() -> None:
    q, cache, tables, lens = batch("two-groups", "cpu")
    scale = jnp.array([0.05, 0.02])
    codes = jnp.round(jnp.nan_to_num(cache) / 0.05).clip(-127, 127)
    start = jnp.arange(len(lens) + 1, dtype=jnp.int32)
    exact = codes * jnp.repeat(jnp.stack([scale, 2 * scale]).T, H, axis=1)[None, :, None]
    want = paged_attention(q, exact, tables, lens, start, max_query_len=1)
    args = (q, codes.astype(jnp.int8), tables, lens)
    got = cascade(args, XLA, k_scale=scale, v_scale=2 * scale)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_a_member_that_has_ended_attends_to_nothing() -> None:
    q, cache, tables, lens = batch("all-share", "cpu")
    prefixes = shared_prefixes(tables, lens, B)
    lens = lens.at[1].set(0)
    start = jnp.arange(len(lens) + 1, dtype=jnp.int32)
    want = paged_attention(q, cache, tables, lens, start, max_query_len=1)
    got = shared_prefix_attention(q, cache, tables, lens, prefixes)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    assert jnp.all(got[0][1] == 0) and jnp.all(jnp.isneginf(got[1][1]))


def test_bad_arguments_are_named() -> None:
    q, cache, tables, lens = batch("all-share", "cpu")
    prefixes = shared_prefixes(tables, lens, B)
    with pytest.raises(ValueError, match=r"q.shape"):
        shared_prefix_attention(q[:2], cache, tables, lens, prefixes)
    with pytest.raises(ValueError, match=r"prefixes.leader has shape"):
        short = dataclasses.replace(prefixes, leader=prefixes.leader[:1])
        shared_prefix_attention(q, cache, tables, lens, short)
    with pytest.raises(ValueError, match=r"prefixes.order has dtype int16"):
        wrong = dataclasses.replace(prefixes, order=prefixes.order.astype(jnp.int16))
        shared_prefix_attention(q, cache, tables, lens, wrong)
