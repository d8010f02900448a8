"""What attention on a CPU with Numba promises beside right numbers: threads, bits, its users."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, Case, build, errors

from octavo.pallas_kernels import cpu_kernels, paged_attention
from octavo.pallas_kernels.paged_attention import numba as numba_op

LONG = Case(seqs=((1, 1000), (1, 5), (1, 2300), (0, 0), (1, 257)), heads=9, kv_heads=3)
MIXED = Case(seqs=((130, 1000), (1, 5), (1, 2300), (0, 0), (3, 257), (40, 40)), heads=9, kv_heads=3)
CACHES = ("float32", "bfloat16")


def attend(problem, **options):
    return jax.jit(lambda *args: paged_attention(*args, implementation="numba", **options))(
        *problem.args
    )


def test_it_is_what_a_cpu_attends_with() -> None:
    assert (cpu_kernels() or "").startswith("numba ")
    problem = build(CASES["decode-long"])
    text = jax.jit(paged_attention).lower(*problem.args).as_text()
    assert "octavo.paged_attention" in text
    named = jax.jit(lambda *args: paged_attention(*args, implementation="xla"))
    assert "octavo.paged_attention" not in named.lower(*problem.args).as_text()


def test_an_address_that_became_a_float_is_refused() -> None:
    import numba

    from octavo.pallas_kernels.vectors import load, splat, store
    from octavo.pallas_kernels.xla_threads import address_of

    @numba.njit
    def shifted(x, step):
        store(address_of(x) + step, load(address_of(x), 4) + splat(np.float32(1), 4))

    x = np.arange(8, dtype=np.float32)
    shifted(x, 16)
    assert x.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]

    @numba.njit
    def unsigned(x, step):
        place = x.ctypes.data
        for _ in range(2):
            store(place, splat(np.float32(0), 4))
            place += step

    with pytest.raises(numba.TypingError):
        unsigned(x, 16)


def test_no_two_compiled_functions_have_one_name() -> None:
    """A process may load one handler that another has compiled, and compile the other itself."""
    from numba.core.registry import CPUDispatcher

    from octavo.pallas_kernels.paged_attention import numba_call

    found: dict[str, set[int]] = {}

    def visit(dispatcher: Any) -> None:
        function = dispatcher.py_func
        named = found.setdefault(f"{function.__module__}.{function.__qualname__}", set())
        if id(function) in named:
            return
        named.add(id(function))
        used = [function.__globals__.get(name) for name in function.__code__.co_names]
        used += [cell.cell_contents for cell in function.__closure__ or ()]
        for other in used:
            if isinstance(other, CPUDispatcher):
                visit(other)

    visit(numba_call._run_float32)
    visit(numba_call._run_bfloat16)
    assert len(found) > 60
    assert {name: ids for name, ids in found.items() if len(ids) > 1} == {}


@pytest.mark.parametrize("case", [LONG, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 300, 700])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_no_bit_depends_on_the_number_of_threads(
    cache_dtype: str, window: int | None, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, window=window, cache_dtype=cache_dtype)
    problem = build(case)
    options = {"sliding_window": window}
    results = []
    for num_threads in (1, 2, 3, 64):
        monkeypatch.setattr(numba_op, "num_threads", lambda n=num_threads: n)
        results.append(attend(problem, **options))
    out, lse = results[0]
    assert errors(out, lse, problem)[0] <= case.tolerances[0]
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("window", [None, 100, 101])
def test_no_bit_depends_on_how_queries_are_cut_into_calls(
    window: int | None, cache_dtype: str
) -> None:
    sizes = {"heads": 9, "kv_heads": 3, "window": window, "cache_dtype": cache_dtype}
    problem = build(Case(seqs=((700, 1000),), **sizes))
    q, cache, tables, _, _ = problem.args
    whole = attend(problem, sliding_window=window)
    for pieces in ([2] * 350, [699, 1], [1] * 20 + [21, 22, 637], [64, 300, 336]):
        begin = 0
        for piece in pieces[:40]:
            end = begin + piece
            lists = (tables, jnp.array([300 + end]), jnp.array([0, piece]))
            lists = tuple(x.astype(jnp.int32) for x in lists)
            options = {"sliding_window": window, "implementation": "numba"}
            got = paged_attention(q[begin:end], cache, *lists, **options)
            for a, b in zip(got, whole, strict=True):
                np.testing.assert_array_equal(a, b[begin:end])
            begin = end


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_queries_in_bfloat16_are_those_numbers_in_float32(cache_dtype: str) -> None:
    problem = build(replace(MIXED, dtype="bfloat16", cache_dtype=cache_dtype))
    q, *others = problem.args
    out, lse = attend(problem)
    want, want_lse = jax.jit(lambda *args: paged_attention(*args, implementation="numba"))(
        q.astype(jnp.float32), *others
    )
    assert (q.dtype, out.dtype, want.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out, want.astype(jnp.bfloat16))
    np.testing.assert_array_equal(lse, want_lse)


def test_long_tables_have_longer_spans() -> None:
    problem = build(LONG)
    q, cache, tables, lens, start = problem.args
    wide = jnp.pad(tables, ((0, 0), (0, 5000 - tables.shape[1])))
    args = (q, cache, wide, lens, start)
    out, lse = paged_attention(*args, max_query_len=1, implementation="numba")
    assert errors(out, lse, problem)[0] <= 2e-5


@pytest.mark.parametrize("what", ["context", "negative context", "query"])
def test_lists_that_do_not_fit_together_touch_no_other_memory(what: str) -> None:
    problem = build(LONG)
    q, cache, tables, lens, start = problem.args
    if what == "query":
        start = start + 100_000
    else:
        lens = lens.at[0].set(10**6 if what == "context" else -50)
    options = {"max_query_len": 1, "implementation": "numba"}
    out, lse = paged_attention(q, cache, tables, lens, start, **options)
    assert not np.asarray(out[0]).any() and np.isneginf(lse[0]).all()
    if what != "query":  # the others are served
        np.testing.assert_allclose(out[1:3], problem.out[1:3], atol=2e-5)


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    problem = build(CASES["decode-boundaries"])
    q, *rest = problem.args
    for factor in (1e3, 1e-6, 0.0):
        args = (q * factor, *rest)
        got, _ = paged_attention(*args, max_query_len=1, implementation="numba")
        want, _ = paged_attention(*args, max_query_len=1, implementation="reference")
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_calls_from_many_threads_do_not_wait_for_one_another() -> None:
    problem = build(MIXED)
    run = jax.jit(lambda *args: paged_attention(*args, implementation="numba"))
    want = np.asarray(run(*problem.args)[0])
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda: np.asarray(run(*problem.args)[0])) for _ in range(200)]
        for call in calls:
            np.testing.assert_array_equal(call.result(timeout=60), want)


def test_it_runs_in_loops_and_under_vmap() -> None:
    problem = build(CASES["decode-long"])
    q, *rest = problem.args

    def attend(q):
        return paged_attention(q, *rest, max_query_len=1, implementation="numba")[0]

    looped = jax.jit(lambda q: jax.lax.fori_loop(0, 5, lambda _, x: q + 0 * attend(x), q))(q)
    np.testing.assert_array_equal(looped, q)
    both = jax.vmap(attend)(jnp.stack([q, 2 * q]))
    np.testing.assert_array_equal(both[1], attend(2 * q))


SCRIPT = """
import sys
if sys.argv[1] == "absent":
    sys.modules["numba"] = None
else:  # no folder that may be written
    from numba.core.caching import CacheImpl
    CacheImpl._locator_classes = []
from octavo.pallas_kernels import cpu_kernels, paged_attention
from attention_cases import CASES, build, errors
problem = build(CASES["mixed"])
assert errors(*paged_attention(*problem.args), problem)[0] <= 2e-5
print(cpu_kernels())
try:
    paged_attention(*problem.args, implementation="numba")
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize("how", ["absent", "unwritable"])
def test_without_it_xla_serves_and_says_why_when_asked(how: str, tmp_path: Path) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    environment = os.environ | {"PYTHONPATH": str(benchmarks)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    advice = {"absent": "pip install 'octavo[cpu]'", "unwritable": "set NUMBA_CACHE_DIR"}
    assert done.stdout.startswith("None\n") and advice[how] in done.stdout
