"""Every implementation of `paged_attention` against float64 NumPy on a poisoned cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo.pallas_kernels import debug_checks, paged_attention

IMPLEMENTATIONS = ("reference", "xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """(query_len, context_len) per sequence; None stands for a row that is not in use."""

    seqs: tuple[tuple[int, int], ...]
    heads: int = 3
    kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    padding: int = 0
    share: int = 0
    dtype: str = "float32"
    tolerance: float = 2e-5


CASES = {
    "decode-boundaries": Case(seqs=((1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 257))),
    "decode-long": Case(seqs=((1, 2050), (1, 3)), heads=9, kv_heads=3),
    "decode-unused-rows": Case(seqs=((0, 0), (1, 40), (0, 0), (1, 1)), padding=3),
    "all-empty": Case(seqs=((0, 0), (0, 0)), padding=4),
    "prefill-whole": Case(seqs=((33, 33),), heads=4, kv_heads=2),
    "prefill-over-tiles": Case(seqs=((300, 300), (129, 700)), heads=2, kv_heads=2),
    "prefill-chunk": Case(seqs=((17, 500), (16, 16), (2, 258)), heads=8, kv_heads=2, padding=5),
    "mixed": Case(seqs=((1, 31), (40, 90), (0, 0), (1, 512), (5, 5)), heads=9, kv_heads=3),
    "shared-prefix": Case(seqs=((1, 100), (8, 104), (1, 97)), share=6),
    "g1-h80": Case(seqs=((1, 50), (20, 33)), heads=3, kv_heads=3, head_size=80),
    "g8-h128": Case(seqs=((1, 50), (20, 33)), heads=16, kv_heads=2, head_size=128),
    "h256": Case(seqs=((1, 50), (20, 33)), heads=2, kv_heads=1, head_size=256),
    "block-8": Case(seqs=((1, 50), (20, 33), (1, 8)), block_size=8),
    "block-256": Case(seqs=((1, 300), (20, 257)), block_size=256),
    "block-3": Case(seqs=((1, 300), (20, 257)), block_size=3),
    "window-below": Case(seqs=((1, 600), (40, 600), (1, 5)), window=37),
    "window-at": Case(seqs=((1, 64), (64, 64)), window=64),
    "window-above": Case(seqs=((1, 64), (30, 64)), window=1000),
    "window-one": Case(seqs=((1, 600), (40, 600)), window=1),
    "soft-cap": Case(seqs=((1, 64), (30, 64)), cap=2.0),
    "sinks": Case(seqs=((1, 64), (30, 64), (0, 0)), sinks=True, heads=6, kv_heads=2),
    "bf16": Case(seqs=((1, 300), (30, 64)), dtype="bfloat16", tolerance=2e-2),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    args: tuple[jax.Array, ...]
    kwargs: dict
    out: np.ndarray
    lse: np.ndarray


def build(case: Case, *, swap_kv: bool = False) -> Problem:
    rng = np.random.default_rng(7)
    dtype = jnp.dtype(case.dtype)
    size, groups = case.block_size, case.heads // case.kv_heads
    blocks_of = [-(-ctx // size) for _, ctx in case.seqs]
    num_blocks = 1 + sum(blocks_of) + 4
    ids = rng.permutation(np.arange(1, num_blocks))
    width = max(blocks_of) + 2
    # Entries past a context hold an id far outside the pool: they must never be followed.
    tables = np.full((len(case.seqs), width), 10**6, np.int32)
    cache = np.full((num_blocks, case.kv_heads, size, 2 * case.head_size), np.nan, np.float32)
    cache[0] = 0
    taken = 0
    for s, count in enumerate(blocks_of):
        tables[s, :count] = ids[taken : taken + count]
        if s and case.share:
            tables[s, : case.share] = tables[0, : case.share]
        taken += count
        for block in tables[s, :count]:
            if np.isnan(cache[block]).any():
                cache[block] = rng.normal(size=cache[block].shape)
    for s, (_, ctx) in enumerate(case.seqs):
        if ctx % size:
            cache[tables[s, ctx // size], :, ctx % size :] = 0
    cache = np.asarray(jnp.asarray(cache, dtype), np.float32)
    start = np.cumsum([0] + [n for n, _ in case.seqs]).astype(np.int32)
    total = int(start[-1]) + case.padding
    q = np.asarray(jnp.asarray(rng.normal(size=(total, case.heads, case.head_size)), dtype))
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None

    out = np.zeros(q.shape, np.float64)
    lse = np.full(q.shape[:2], -np.inf)
    for s, (count, ctx) in enumerate(case.seqs):
        rows = cache[tables[s, : blocks_of[s]]].astype(np.float64)
        rows = rows.transpose(1, 0, 2, 3).reshape(case.kv_heads, -1, 2 * case.head_size)[:, :ctx]
        k, v = rows[..., : case.head_size], rows[..., case.head_size :]
        if swap_kv:
            k, v = v, k
        for i in range(count):
            position = ctx - count + i
            low = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.heads):
                keys = k[head // groups, low : position + 1]
                logits = keys @ np.asarray(q[start[s] + i, head], np.float64)
                logits /= np.sqrt(case.head_size)
                if case.cap is not None:
                    logits = case.cap * np.tanh(logits / case.cap)
                sink = np.array([] if sinks is None else [sinks[head]], np.float64)
                every = np.concatenate([logits, sink])
                peak = every.max()
                denominator = np.exp(every - peak).sum()
                weights = np.exp(logits - peak) / denominator
                out[start[s] + i, head] = weights @ v[head // groups, low : position + 1]
                lse[start[s] + i, head] = peak + np.log(denominator)
    args = (q, cache, tables, np.array([c for _, c in case.seqs], np.int32), start)
    kwargs = {"sliding_window": case.window, "soft_cap": case.cap}
    if sinks is not None:
        kwargs["sinks"] = jnp.asarray(sinks)
    arrays = [jnp.asarray(a) for a in args]
    arrays[1] = arrays[1].astype(dtype)
    return Problem(tuple(arrays), kwargs, out, lse)


def run(problem: Problem, implementation: str, **more):
    fn = jax.jit(
        lambda *args: paged_attention(
            *args, **problem.kwargs, **more, implementation=implementation
        )
    )
    out, lse = fn(*problem.args)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, implementation: str) -> None:
    problem, tolerance = build(CASES[name]), CASES[name].tolerance
    out, lse = run(problem, implementation)
    np.testing.assert_allclose(out, problem.out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, problem.lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode-long", "mixed"])
def test_a_swap_of_keys_and_values_is_noticed(name: str, implementation: str) -> None:
    problem = build(CASES[name], swap_kv=True)
    out, _ = run(problem, implementation)
    assert np.abs(out - problem.out).max() > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_decode_bound_changes_nothing(implementation: str) -> None:
    problem = build(CASES["decode-unused-rows"])
    for got, want in zip(
        run(problem, implementation, max_query_len=1), run(problem, implementation), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "max_query_len"), [("decode-long", 1), ("prefill-chunk", None), ("mixed", None)]
)
def test_block_order_does_not_matter_to_the_bit(
    name: str, max_query_len: int | None, implementation: str
) -> None:
    problem = build(CASES[name])
    q, cache, tables, lens, start = problem.args
    order = np.random.default_rng(0).permutation(np.arange(1, cache.shape[0]))
    inverse = np.zeros(cache.shape[0], np.int32)
    inverse[order] = np.arange(1, cache.shape[0])
    moved = jnp.concatenate([cache[:1], cache[order]])
    inside = np.asarray(tables) < cache.shape[0]
    renamed = np.where(inside, inverse[np.where(inside, tables, 0)], tables)
    other = dataclasses.replace(problem, args=(q, moved, jnp.asarray(renamed), lens, start))
    for got, want in zip(
        run(other, implementation, max_query_len=max_query_len),
        run(problem, implementation, max_query_len=max_query_len),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_the_pool_never_reads_another_sequence(bad: int, implementation: str) -> None:
    problem = build(CASES["decode-boundaries"])
    q, cache, tables, lens, start = problem.args
    poisoned = cache.at[1:].set(jnp.nan)
    tables = jnp.full_like(tables, bad)
    other = dataclasses.replace(problem, args=(q, poisoned, tables, lens, start))
    out, _ = run(other, implementation)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_debug_mode_reports_an_id_outside_the_pool(bad: int) -> None:
    problem = build(CASES["decode-boundaries"])
    q, cache, tables, lens, start = problem.args
    # Jitted inside, and run before without checks: no trace of that may be taken.
    attend = jax.jit(paged_attention)
    attend(q, cache, tables, lens, start)
    checked = checkify.checkify(attend, errors=checkify.user_checks)
    with debug_checks(True):
        error, _ = checked(q, cache, tables, lens, start)
        error.throw()
        error, _ = checked(q, cache, tables.at[2, 0].set(bad), lens, start)
    with pytest.raises(checkify.JaxRuntimeError, match=str(bad)):
        error.throw()


BAD_ARGUMENTS = {
    "q-rank": (lambda a, k: a.__setitem__(0, a[0][0]), r"q.shape"),
    "heads": (lambda a, k: a.__setitem__(0, a[0][:, :2]), r"multiple of the KV heads"),
    "row": (lambda a, k: a.__setitem__(1, a[1][..., :100]), r"rows of at least"),
    "tables": (lambda a, k: a.__setitem__(2, a[2][:1]), r"block_tables.shape"),
    "start": (lambda a, k: a.__setitem__(4, a[4][:-1]), r"query_start.shape"),
    "dtype": (lambda a, k: a.__setitem__(3, a[3].astype(jnp.int16)), r"context_lens has dtype"),
    "window": (lambda a, k: k.__setitem__("sliding_window", 0), r"sliding_window=0"),
    "cap": (lambda a, k: k.__setitem__("soft_cap", -1.0), r"soft_cap=-1.0"),
    "sinks": (lambda a, k: k.__setitem__("sinks", jnp.zeros(2)), r"sinks.shape"),
    "bound": (lambda a, k: k.__setitem__("max_query_len", 0), r"max_query_len=0"),
    "name": (lambda a, k: k.__setitem__("implementation", "cuda"), r"expected one of"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(name: str) -> None:
    change, message = BAD_ARGUMENTS[name]
    problem = build(CASES["mixed"])
    args, kwargs = list(problem.args), {}
    change(args, kwargs)
    with pytest.raises(ValueError, match=message):
        paged_attention(*args, **kwargs)


def test_memory_is_bounded_by_a_chunk_not_by_the_context() -> None:
    def temp_bytes(table_len: int) -> int:
        aval = jax.ShapeDtypeStruct
        args = (
            aval((512, 9, 64), jnp.float32),
            aval((4096, 3, 16, 128), jnp.float32),
            aval((1, table_len), jnp.int32),
            aval((1,), jnp.int32),
            aval((2,), jnp.int32),
        )
        compiled = jax.jit(paged_attention).lower(*args).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temp_bytes(8192) < temp_bytes(256) + (1 << 20)
