"""Moving whole blocks, `merge_states` and the layout."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo.pallas_kernels import (
    cache_shape,
    copy_blocks,
    debug_checks,
    gather_blocks,
    init_kv_cache,
    merge_states,
    row_width,
    scatter_blocks,
)

from .implementations import (
    H200,
    JAX_VERSION,
    NUMBA,
    REFERENCE,
    V6E,
    V6E_RACES,
    XLA,
    Implementation,
    marks_of,
)


def cache_of(num_blocks: int = 7, dtype: str = "float32", width: int = 128) -> jax.Array:
    numbers = np.random.default_rng(0).integers(-100, 100, (num_blocks, 2, 4, width))
    return jnp.asarray(numbers, jnp.int8).astype(dtype)


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def params(cases: Iterable[str]) -> list:
    """(implementation, case, dtype) parameters: every dtype with one case, one with the others."""
    found = []
    for implementation in (REFERENCE, XLA, NUMBA, V6E, V6E_RACES, H200):
        slow = () if implementation.chip is None else (pytest.mark.kernels,)
        for i, case in enumerate(cases):
            for j, dtype in enumerate(DTYPES if i == 0 else DTYPES[i % len(DTYPES) :][:1]):
                name = f"{implementation}-{case}-{dtype}"
                marks = marks_of(implementation, *(slow if i or j else ()))
                found.append(pytest.param(implementation, case, dtype, id=name, marks=marks))
    return found


def run(implementation: Implementation, op: Callable[..., jax.Array], *args: jax.Array):
    with implementation.context():
        fn = jax.jit(lambda *a: op(*a, implementation=implementation.name))
        return np.asarray(fn(*args))


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


COPIES = {
    "cycle-reads-before-it-writes": ([1, 2, 3, 4, 5], [2, 3, 1, 0, 6]),
    "chain-longer-than-what-is-in-flight": ([*range(1, 22)], [*range(2, 23)]),
    "one": ([3], [5]),
    "fan-out-and-onto-itself": ([3, 3, 3, 6], [1, 2, 6, 6]),
    "many": ([*range(1, 21)], [*range(21, 41)]),
    "one-target-twice": ([1, 2, 3, 4], [9, 7, 7, 9]),
    "outside": ([3, 10**6, -1, 4, 5], [10**6, 2, 6, -(10**6), -1]),
    "padding": ([3, 4], [0, 0]),
}


@pytest.mark.parametrize(("implementation", "name", "dtype"), params(COPIES))
def test_copy_blocks_copies_those_and_no_others(
    implementation: Implementation, name: str, dtype: str, record_property
) -> None:
    record_property("kernel_case", f"copy_blocks, {name}, {dtype}, {implementation}")
    cache = cache_of(42, dtype)
    want, old = np.asarray(cache).copy(), np.asarray(cache)
    for s, d in zip(*COPIES[name], strict=True):
        if 0 < d < len(old):
            want[d] = old[s if 0 <= s < len(old) else 0]
    src, dst = (ids(*values) for values in COPIES[name])
    same_bits(run(implementation, copy_blocks, cache, src, dst), want)


PACKED = {
    "several": [3, 0, 39, 3, 10**6, -4, 5],
    "many": [*range(40, 1, -1)],
    "one": [7],
    "padding": [0, 0],
}


@pytest.mark.parametrize(("implementation", "name", "dtype"), params(PACKED))
def test_gathered_and_scattered_blocks_are_the_cache_s(
    implementation: Implementation, name: str, dtype: str, record_property
) -> None:
    record_property("kernel_case", f"gather and scatter, {name}, {dtype}, {implementation}")
    cache, where = cache_of(42, dtype), PACKED[name]
    old = np.asarray(cache)
    blocks = run(implementation, gather_blocks, cache, ids(*where))
    same_bits(blocks, old[[i if 0 <= i < len(old) else 0 for i in where]])

    new = -cache_of(len(where), dtype)
    want = old.copy()
    for i, block in zip(where, np.asarray(new), strict=True):
        if 0 < i < len(want):
            want[i] = block  # of those with one id the last
    same_bits(run(implementation, scatter_blocks, cache, ids(*where), new), want)


@pytest.mark.parametrize("implementation", [XLA, NUMBA, V6E], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_packed_blocks_is_scattered(implementation: Implementation, dtype: str) -> None:
    cache, where = cache_of(900, dtype), [*PACKED["several"], *range(40, 800, 2)]
    packed = jnp.stack([cache_of(len(where) + i, dtype)[i:] for i in range(3)], axis=1)
    for layer in (0, 2):
        want = np.asarray(cache).copy()
        for i, block in zip(where, np.asarray(packed[:, layer]), strict=True):
            if 0 < i < len(want):
                want[i] = block
        scatter = partial(scatter_blocks, layer=layer)
        same_bits(run(implementation, scatter, cache, ids(*where), packed), want)


@pytest.mark.parametrize("implementation", [XLA, NUMBA], ids=str)
def test_blocks_that_are_no_whole_cache_lines_are_scattered(implementation: Implementation) -> None:
    numbers = np.random.default_rng(2).integers(-100, 100, (13, 2, 1, 3, 8))
    packed = jnp.asarray(numbers, jnp.int8)  # 24 bytes
    cache, where = jnp.zeros((9, 1, 3, 8), jnp.int8), [4, 0, 8, 1, 9, 7, 2, 3, 5, 6, 0, 0, 0]
    want = np.zeros(cache.shape, np.int8)
    for i, block in zip(where, numbers[:, 1], strict=True):
        if 0 < i < len(want):
            want[i] = block
    scatter = partial(scatter_blocks, layer=1)
    same_bits(run(implementation, scatter, cache, ids(*where), packed), want)


@pytest.mark.parametrize("implementation", [XLA, NUMBA, V6E], ids=str)
def test_chosen_blocks_are_scattered(implementation: Implementation) -> None:
    cache, packed = cache_of(42), jnp.stack([-cache_of(9), cache_of(10)[1:] * 2], axis=1)
    where, sources = [5, 0, 40, 7, 8, 30, 5], [8, 3, 0, 9, -1, 3, 4]
    want = np.asarray(cache).copy()
    want[40], want[30], want[5] = (np.asarray(packed[i, 1]) for i in (0, 3, 4))

    def scatter(cache, where, sources, packed, implementation):
        return scatter_blocks(
            cache, where, packed, layer=1, sources=sources, implementation=implementation
        )

    same_bits(run(implementation, scatter, cache, ids(*where), ids(*sources), packed), want)


@pytest.mark.parametrize("implementation", [REFERENCE, XLA, NUMBA, V6E], ids=str)
def test_no_blocks_are_no_work(implementation: Implementation) -> None:
    cache, none = cache_of(), ids()
    same_bits(run(implementation, copy_blocks, cache, none, none), np.asarray(cache))
    assert run(implementation, gather_blocks, cache, none).shape == (0, 2, 4, 128)
    same_bits(run(implementation, scatter_blocks, cache, none, cache[:0]), np.asarray(cache))


@pytest.mark.parametrize("op", ["copy", "scatter"])
@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moving_blocks_does_not_copy_a_donated_cache(dtype: str, op: str, layers: str) -> None:
    layer, both = (jax.ShapeDtypeStruct((n, 2, 16, 128), dtype) for n in (1024, 2048))
    index, packed = (
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((4, 2, 16, 128), dtype),
    )

    def move(cache, i, a, b):
        return copy_blocks(cache, i + a, i + b) if op == "copy" else scatter_blocks(cache, i + a, b)

    def unrolled(caches, a, b):
        return [move(cache, jnp.int32(0), a, b) for cache in caches]

    def scan(cache, a, b):
        return jax.lax.scan(lambda c, i: (move(c, i, a, b), None), cache, ids(0, 1024))[0]

    fn, first = (unrolled, [layer, layer]) if layers == "unrolled" else (scan, both)
    args = (index, index if op == "copy" else packed)
    analysis = jax.jit(fn, donate_argnums=0).lower(first, *args).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 1 << 19  # a layer is 8 MiB or more, four blocks 64 KiB


@pytest.mark.parametrize("bad", [-1, 7, 10**6])
def test_debug_mode_reports_a_block_outside(bad: int) -> None:
    cache = cache_of()
    for op, args in (
        (copy_blocks, (cache, ids(bad), ids(5))),
        (copy_blocks, (cache, ids(5), ids(bad))),
        (gather_blocks, (cache, ids(bad))),
        (scatter_blocks, (cache, ids(bad), cache[:1])),
    ):
        checked = checkify.checkify(op, errors=checkify.user_checks)
        with debug_checks(True):
            error, _ = checked(*args)
        with pytest.raises(checkify.JaxRuntimeError, match="outside"):
            error.throw()


def test_gather_and_scatter_name_bad_arguments() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match=r"must be \[P, K, B, ROW\]"):
        gather_blocks(cache[0], ids(1))
    with pytest.raises(ValueError, match="must be a vector"):
        gather_blocks(cache, ids(1)[None])
    with pytest.raises(ValueError, match="block_ids has dtype"):
        scatter_blocks(cache, ids(1).astype(jnp.int16), cache[:1])
    with pytest.raises(ValueError, match="blocks is float32"):
        scatter_blocks(cache, ids(1), cache[:2])
    with pytest.raises(ValueError, match="blocks is bfloat16"):
        scatter_blocks(cache, ids(1), cache[:1].astype(jnp.bfloat16))
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=rf"with layer={layer} in \[0, L\)"):
            scatter_blocks(cache, ids(1), cache[:1, None], layer=layer)
    with pytest.raises(ValueError, match="must be"):
        scatter_blocks(cache, ids(1), cache[:1], layer=0)
    with pytest.raises(ValueError, match=r"sources\.shape"):
        scatter_blocks(cache, ids(1), cache, sources=ids(1, 2))
    with pytest.raises(ValueError, match="sources has dtype"):
        scatter_blocks(cache, ids(1), cache, sources=ids(1).astype(jnp.int16))


def test_a_kernel_says_what_blocks_it_cannot_move() -> None:
    odd = jnp.zeros((5, 1, 1, 12), jnp.int8)
    with pytest.raises(NotImplementedError, match="multiple of 8 bytes"):
        run(NUMBA, scatter_blocks, odd, ids(1), odd[:1])
    assert scatter_blocks(odd, ids(1), odd[:1] + 1).sum() == 12  # XLA can
    narrow, tiny = cache_of(width=80), cache_of(width=10)
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        run(V6E, gather_blocks, narrow, ids(1))
    with pytest.raises(NotImplementedError, match="float16"):
        run(V6E, copy_blocks, cache_of(dtype="float16"), ids(1), ids(2))
    message = "multiple of 128" if JAX_VERSION >= (0, 11) else "older than 0.11"
    with pytest.raises(NotImplementedError, match=message):
        run(H200, scatter_blocks, tiny, ids(1), tiny[:1])


def test_copy_blocks_names_bad_arguments() -> None:
    with pytest.raises(ValueError, match="equal vectors"):
        copy_blocks(cache_of(), jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="expected int32"):
        copy_blocks(cache_of(), jnp.zeros(2, jnp.int16), jnp.zeros(2, jnp.int16))


def softmax_state(logits: np.ndarray, values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    if not len(logits):
        return jnp.full((1, values.shape[-1]), jnp.nan), jnp.full((1,), -jnp.inf)
    weights = np.exp(logits - logits.max())
    out = weights @ values / weights.sum()
    lse = logits.max() + np.log(weights.sum())
    return jnp.asarray(out[None], jnp.float32), jnp.asarray(lse[None], jnp.float32)


@pytest.mark.parametrize("cut", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("shift", [0.0, 200.0, -200.0])
def test_merge_states_is_attention_over_the_union(cut: int, shift: float) -> None:
    rng = np.random.default_rng(cut)
    logits, values = rng.normal(size=10) + shift, rng.normal(size=(10, 4))
    parts = softmax_state(logits[:cut], values[:cut]), softmax_state(logits[cut:], values[cut:])
    want = softmax_state(logits, values)
    for a, b in (parts, parts[::-1]):
        for got, expected in zip(merge_states(*a, *b), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_merging_two_empty_states_is_empty() -> None:
    empty = softmax_state(np.zeros(0), np.zeros((0, 4)))
    out, lse = merge_states(*empty, *empty)
    np.testing.assert_array_equal(np.asarray(out), 0)
    assert np.isneginf(np.asarray(lse)).all()


def test_merge_states_names_bad_arguments() -> None:
    out, lse = jnp.zeros((2, 4)), jnp.zeros(2)
    with pytest.raises(ValueError, match="must equal"):
        merge_states(out, lse, out[:1], lse[:1])
    with pytest.raises(ValueError, match="lse_b"):
        merge_states(out, lse, out, lse[:1])
    with pytest.raises(ValueError, match="lse_a"):
        merge_states(out, lse.astype(jnp.bfloat16), out, lse)


def test_the_layout_pads_rows_on_tpu_only() -> None:
    assert [row_width(h, "tpu") for h in (64, 80, 128)] == [128, 256, 256]
    assert [row_width(h, "gpu") for h in (64, 80, 128)] == [128, 160, 256]
    assert cache_shape(10, 3, 16, 64, "cpu") == (10, 3, 16, 128)
    caches = init_kv_cache(2, (3, 1, 4, 8), jnp.bfloat16)
    assert [(c.shape, c.dtype) for c in caches] == [((3, 1, 4, 8), jnp.bfloat16)] * 2
    assert not any(np.asarray(c.astype(jnp.float32)).any() for c in caches)
    with pytest.raises(ValueError, match="num_blocks=1"):
        cache_shape(1, 3, 16, 64, "cpu")
    with pytest.raises(ValueError, match="block_size=0"):
        cache_shape(4, 3, 0, 64, "cpu")


def test_the_docstring_example_runs() -> None:
    module = importlib.import_module("octavo.pallas_kernels.merge_states")
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
