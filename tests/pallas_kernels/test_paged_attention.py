"""Every implementation of `paged_attention` against float64 NumPy on a poisoned cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, Problem, build, errors
from jax.experimental import checkify

from octavo.pallas_kernels import CHIPS, Tuning, debug_checks, kernel_tuning, paged_attention

from .implementations import (
    A100,
    A100_RACES,
    B200,
    H200,
    H200_RACES,
    NUMBA,
    REFERENCE,
    V4,
    V6E,
    V6E_RACES,
    XLA,
    Implementation,
    marks_of,
    params,
)

# What runs without --kernels.
QUICK: dict[Implementation, set[str]] = {
    REFERENCE: set(CASES),
    XLA: set(CASES),
    NUMBA: set(CASES),
    V6E: {"decode-boundaries", "mixed", "window-below", "sinks", "int8"},
    V4: set(),
    V6E_RACES: {"decode-unused-rows"},
    H200: {"decode-boundaries", "mixed", "int8"},
    H200_RACES: {"decode-unused-rows"},
    A100: {"mixed"},
    A100_RACES: set(),
    B200: set(),
}
# The simulators take seconds a call, and these take many calls' worth of blocks.
TOO_LARGE = {"decode-long", "decode-thousands", "prefill-over-tiles", "prefill-thousands"}

# Cases that a kernel says it cannot serve, and what it says.
REFUSED = {
    ("mosaic_tpu", "block-3"): "block_size=3",
    ("mosaic_gpu", "block-3"): "block_size=3",
    ("numba", "block-3"): "multiple of 4",
    **{("numba", name): "must be float32" for name in ("int8", "fp8")},
    **{("numba", name): "not supported" for name in ("soft-cap", "sinks", "sinks-long")},
    ("numba", "int8-window-cap-sinks"): "must be float32",
}
FAST = [
    REFERENCE,
    XLA,
    NUMBA,
    pytest.param(V6E, marks=pytest.mark.kernels),
]
INTERPRETED = [
    pytest.param(i, marks=marks_of(i), id=str(i)) for i in (REFERENCE, XLA, NUMBA, V6E, H200)
]


def run(problem: Problem, implementation: Implementation, **more) -> tuple[jax.Array, jax.Array]:
    fn = jax.jit(
        lambda *args: paged_attention(
            *args, **problem.kwargs, **more, implementation=implementation.name
        )
    )
    with implementation.context():
        return jax.block_until_ready(fn(*problem.args))


@pytest.mark.parametrize(("implementation", "name"), params(QUICK, CASES, skip=TOO_LARGE))
def test_matches_float64(
    implementation: Implementation, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("kernel_case", f"paged_attention, {name}, {implementation}")
    case = implementation.adapt(CASES[name])
    problem = build(case, platform=implementation.platform)
    if message := REFUSED.get((implementation.name, name)):
        with pytest.raises(NotImplementedError, match=message):
            run(problem, implementation)
        return
    worst, mean = errors(*run(problem, implementation), problem)
    assert worst <= case.tolerances[0] and mean <= case.tolerances[1], (worst, mean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CASES if ("numba", name) not in REFUSED])
def test_with_numba_a_cache_in_bfloat16_matches_float64(name: str, dtype: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype, cache_dtype="bfloat16")
    problem = build(case)
    worst, mean = errors(*run(problem, NUMBA), problem)
    assert worst <= case.tolerances[0] and mean <= case.tolerances[1], (worst, mean)


@pytest.mark.parametrize("implementation", FAST, ids=str)
@pytest.mark.parametrize("name", ["decode-long", "mixed"])
def test_a_swap_of_keys_and_values_is_noticed(name: str, implementation: Implementation) -> None:
    problem = build(CASES[name], platform=implementation.platform, swap_kv=True)
    assert errors(*run(problem, implementation), problem)[0] > 0.1


@pytest.mark.parametrize("implementation", FAST, ids=str)
def test_the_decode_bound_changes_nothing(implementation: Implementation) -> None:
    problem = build(CASES["decode-unused-rows"], platform=implementation.platform)
    for got, want in zip(
        run(problem, implementation, max_query_len=1), run(problem, implementation), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", FAST, ids=str)
@pytest.mark.parametrize(
    ("name", "max_query_len"), [("decode-long", 1), ("prefill-chunk", None), ("mixed", None)]
)
def test_block_order_does_not_matter_to_the_bit(
    name: str, max_query_len: int | None, implementation: Implementation
) -> None:
    problem = build(CASES[name], platform=implementation.platform)
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


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("kept", [0, 1])
def test_the_companions_of_a_sequence_do_not_change_a_bit(
    kept: int, implementation: Implementation
) -> None:
    """A decode and a prefill, beside others with as short and as other contexts as can be."""
    case = implementation.adapt(CASES["mixed"])
    problem = build(case, platform=implementation.platform)
    q, cache, tables, lens, start = problem.args
    query_lens = np.diff(np.asarray(start))
    mine = np.arange(len(lens)) == kept
    other_lens = np.where(mine, np.asarray(lens), query_lens).astype(np.int32)
    moved = np.where(mine[:, None], np.asarray(tables), np.roll(np.asarray(tables), 1, axis=0))
    moved = np.where(mine[:, None] | (moved < cache.shape[0]), moved, 0)
    args = (q, cache, jnp.asarray(moved), jnp.asarray(other_lens), start)
    other = run(dataclasses.replace(problem, args=args), implementation)
    own = slice(int(start[kept]), int(start[kept + 1]))
    for got, want in zip(other, run(problem, implementation), strict=True):
        np.testing.assert_array_equal(
            np.asarray(got[own], np.float32), np.asarray(want[own], np.float32)
        )
        assert np.isfinite(np.asarray(got[own], np.float32)).all()


@pytest.mark.parametrize(
    ("implementation", "kernel", "name"),
    [
        pytest.param(i, kernel, name, marks=marks_of(i, pytest.mark.kernels), id=f"{i}-{name}")
        for i, kernel, name in (
            (H200, "decode", "decode-chunk-edges"),
            (H200_RACES, "decode", "decode-many-tiles"),
            (H200, "tiles", "prefill-chunk"),
            (H200, "tiles", "window-below"),
            (A100, "tiles", "not-causal"),
        )
    ],
)
def test_splits_of_the_keys_change_no_more_than_rounding(
    implementation: Implementation, kernel: str, name: str
) -> None:
    problem = build(implementation.adapt(CASES[name]))
    results = []
    for splits in (1, 3, 16):
        chip = CHIPS[implementation.chip or ""].name
        entry = {"kernel": f"mosaic_gpu.{kernel}", "chip": chip, "when": {}}
        tuning = Tuning.from_json(json.dumps([entry | {"knobs": {"splits": splits}}]))
        with kernel_tuning(tuning):
            results.append(run(problem, implementation))
    for out, lse in results:
        assert errors(out, lse, problem)[0] <= 2e-2
        np.testing.assert_allclose(lse, results[0][1], atol=1e-5)


@pytest.mark.slow
def test_products_of_some_of_a_tiles_queries() -> None:
    """On a TPU, products narrower than a tile, whose masks differ."""
    case, chip = CASES["prefill-whole"], CHIPS[V6E.chip or ""].name
    case = dataclasses.replace(case, dtype="bfloat16")
    knobs = {"tile_queries": 64, "chunk_tokens": 64, "lanes": 64}
    entry = {"kernel": "mosaic_tpu.tiles", "chip": chip, "when": {}, "knobs": knobs}
    problem = build(case, platform="tpu")
    worst, _ = errors(*run(problem, dataclasses.replace(V6E, knobs=json.dumps([entry]))), problem)
    assert worst <= case.tolerances[0]


@pytest.mark.parametrize("implementation", FAST, ids=str)
@pytest.mark.parametrize("case", ["decode-boundaries", "mixed"])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_the_pool_never_reads_another_sequence(
    bad: int, case: str, implementation: Implementation
) -> None:
    problem = build(CASES[case], platform=implementation.platform)
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
    "window-not-causal": (
        lambda a, k: k.update(sliding_window=4, causal=False),
        r"sliding_window=4 needs causal=True",
    ),
    "one-scale": (lambda a, k: k.__setitem__("k_scale", jnp.ones(3)), r"together"),
    "scales-of-floats": (
        lambda a, k: k.update(k_scale=jnp.ones(3), v_scale=jnp.ones(3)),
        r"float32 takes no scales",
    ),
    "scale-shape": (
        lambda a, k: (
            a.__setitem__(1, a[1].astype(jnp.float8_e4m3fn)),
            k.update(k_scale=jnp.ones(3), v_scale=jnp.ones(2)),
        ),
        r"v_scale is float32\[2\], expected float32\[3\]",
    ),
    "int8-without-scales": (
        lambda a, k: a.__setitem__(1, a[1].astype(jnp.int8)),
        r"needs k_scale and v_scale",
    ),
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
