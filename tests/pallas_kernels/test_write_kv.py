"""`write_kv`: every implementation against NumPy, to the bit, on a cache full of garbage."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo.pallas_kernels import (
    CHIPS,
    Interpretation,
    debug_checks,
    interpret_kernels,
    kv_scales,
    paged_attention,
    row_width,
    write_kv,
)
from octavo.pallas_kernels.quantise import quantise

from .implementations import (
    A100,
    B200,
    H200,
    H200_RACES,
    JAX_VERSION,
    NUMBA,
    REFERENCE,
    V4,
    V6E,
    V6E_RACES,
    XLA,
    Implementation,
    params,
)

LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Slots of one call's tokens as (block, offset); block 0 is padding."""

    tokens: tuple[tuple[int, int], ...]
    heads: int = 3
    block_size: int = 8
    head_size: int = 64
    num_blocks: int = 9
    dtype: str = "bfloat16"

    @property
    def slots(self) -> list[int]:
        return [block * self.block_size + offset for block, offset in self.tokens]


def run_of(block: int, begin: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple((block, offset) for offset in range(begin, end))


def shuffled(tokens: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(tokens[i] for i in np.random.default_rng(3).permutation(len(tokens)))


# Rows beside others of their group, a block filled, one opened in part, holes, padding, outside.
MIXED = (
    *((1, 1), (0, 0), *run_of(2, 0, 8), (5, 0), (5, 1), (5, 2), (0, 3), (7, 3), (6, 0), (6, 5)),
    *((10**6, 1), (9, 0), (-1, 0), (-(10**6), 2), (8, 7)),
)
CASES = {
    "one": Case(tokens=((3, 5),), heads=8),
    "opens-a-block": Case(tokens=((4, 0),), dtype="float32", heads=1),
    "all-padding": Case(tokens=((0, 0), (0, 0), (0, 5))),
    "mixed": Case(tokens=MIXED),
    "mixed-float32": Case(tokens=MIXED, dtype="float32"),
    "mixed-int8": Case(tokens=MIXED, dtype="int8"),
    "mixed-fp8": Case(tokens=MIXED, dtype="float8_e4m3fn"),
    "shuffled-run": Case(
        tokens=shuffled(run_of(2, 3, 16) + run_of(1, 0, 16)), block_size=16, num_blocks=4
    ),
    "runs": Case(
        tokens=(*run_of(3, 5, 16), *run_of(1, 0, 16), *run_of(2, 0, 9)),
        block_size=16,
        heads=1,
        head_size=80,
        num_blocks=5,
    ),
    "large-blocks": Case(
        tokens=((2, 5), (2, 0), (3, 40), (4, 0), *run_of(1, 12, 41), (4, 37)),
        block_size=64,
        num_blocks=6,
    ),
    "long-run-int8": Case(
        tokens=tuple(token for block in (4, 2, 9) for token in run_of(block, 0, 16))
        + tuple((0, 0) for _ in range(500)),
        block_size=16,
        heads=1,
        num_blocks=11,
        dtype="int8",
    ),
}
QUICK: dict[Implementation, set[str]] = {
    REFERENCE: set(CASES),
    XLA: set(CASES),
    NUMBA: set(CASES),
    V6E: {"mixed", "shuffled-run", "runs", "mixed-int8"},
    V4: set(),
    V6E_RACES: {"mixed"},
    H200: {"mixed", "shuffled-run", "mixed-fp8"},
    H200_RACES: {"mixed"},
    A100: set(),
    B200: set(),
}


def inputs(case: Case, platform: str = "cpu") -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """`(cache, k, v, slots)` with garbage in the cache, and scales that some numbers exceed."""
    rng = np.random.default_rng(1)
    width = row_width(case.head_size, platform)
    shape = (case.num_blocks, case.heads, case.block_size, width)
    cache = jnp.asarray(rng.integers(-100, 100, shape), jnp.int8).astype(case.dtype)
    if case.dtype != "int8":
        cache = jnp.where(rng.random(shape) < 0.5, jnp.asarray(jnp.nan, case.dtype), cache)
    k, v = rng.normal(size=(2, len(case.tokens), case.heads, case.head_size)).astype(np.float32)
    scales = {}
    if case.dtype in LARGEST:
        each = 2.0 / LARGEST[case.dtype] * (1 + np.arange(case.heads))
        scales = {"k_scale": jnp.float32(each), "v_scale": jnp.float32(each[::-1] / 2)}
    slots = jnp.asarray(case.slots, jnp.int32)
    return [cache, jnp.asarray(k), jnp.asarray(v), slots], scales


def stored(x: np.ndarray, scale: jax.Array | None, dtype: np.dtype) -> np.ndarray:
    if scale is None:
        return x.astype(dtype)
    largest = LARGEST[dtype.name]
    x = np.clip(x / np.asarray(scale)[:, None], -largest, largest)
    return (np.round(x) if dtype == np.int8 else x).astype(dtype)


def expected(case: Case, args: list[jax.Array], scales: dict[str, jax.Array]) -> np.ndarray:
    cache, k, v, _ = (np.asarray(x).copy() for x in args)
    k = stored(k, scales.get("k_scale"), cache.dtype)
    v = stored(v, scales.get("v_scale"), cache.dtype)
    live = [(i, *token) for i, token in enumerate(case.tokens) if 0 < token[0] < case.num_blocks]
    for _, block, offset in live:
        if offset == 0:
            cache[block] = 0
    for i, block, offset in live:
        cache[block, :, offset] = 0
        cache[block, :, offset, : case.head_size] = k[i]
        cache[block, :, offset, case.head_size : 2 * case.head_size] = v[i]
    return cache


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def run(
    args: list[jax.Array], scales: dict[str, jax.Array], implementation: Implementation
) -> jax.Array:
    fn = jax.jit(lambda *a: write_kv(*a, **scales, implementation=implementation.name))
    with implementation.context():
        return jax.block_until_ready(fn(*args))


@pytest.mark.parametrize(("implementation", "name"), params(QUICK, CASES))
def test_matches_numpy_to_the_bit(
    implementation: Implementation, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("kernel_case", f"write_kv, {name}, {implementation}")
    case = CASES[name]
    args, scales = inputs(case, implementation.platform)
    got = run(args, scales, implementation)
    np.testing.assert_array_equal(bits(got), bits(expected(case, args, scales)))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_what_was_written_is_read(dtype: str) -> None:
    case = Case(tokens=((3, 0),), dtype=dtype)
    (cache, k, v, slots), _ = inputs(case)
    scales = {}
    if dtype in LARGEST:
        scales = dict(zip(("k_scale", "v_scale"), kv_scales(k, v, dtype), strict=True))
    cache = write_kv(cache.at[0].set(0), k, v, slots, **scales)
    one, table = jnp.ones(1, jnp.int32), jnp.full((1, 1), 3, jnp.int32)
    out, _ = paged_attention(k, cache, table, one, jnp.array([0, 1], jnp.int32), **scales)
    np.testing.assert_allclose(out, v, atol=0.2 if dtype == "float8_e4m3fn" else 0.02)


@pytest.mark.parametrize("implementation", [XLA, NUMBA, V6E], ids=str)
def test_a_slot_that_occurs_twice_spoils_no_other(implementation: Implementation) -> None:
    case = Case(tokens=(*run_of(1, 0, 8), (1, 7), (2, 0), (2, 0), (4, 3)), heads=1)
    args, scales = inputs(case, implementation.platform)
    got, want = run(args, scales, implementation), expected(case, args, scales)
    apart = np.ones(want.shape[0] * want.shape[2], bool)
    apart[[1 * 8 + 7, 2 * 8]] = False

    def others(x: jax.Array | np.ndarray) -> np.ndarray:
        return np.swapaxes(bits(x), 1, 2).reshape(len(apart), -1)[apart]

    np.testing.assert_array_equal(others(got), others(want))


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_donated_cache_is_not_copied(dtype: str, layers: str) -> None:
    layer = jax.ShapeDtypeStruct((2048, 3, 16, 128), dtype)  # 12 MiB or more
    both = jax.ShapeDtypeStruct((2 * 2048, 3, 16, 128), dtype)
    scale = jnp.ones(3) if dtype == "int8" else None
    new = jax.ShapeDtypeStruct((16, 3, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((16,), jnp.int32)

    def unrolled(caches, k, v, s):
        return [write_kv(c, k, v, s, k_scale=scale, v_scale=scale) for c in caches]

    def scan(cache, k, v, s):
        def one(cache, layer):
            slots = s + layer * 2048 * 16
            return write_kv(cache, k, v, slots, k_scale=scale, v_scale=scale), None

        return jax.lax.scan(one, cache, jnp.arange(2, dtype=jnp.int32))[0]

    fn, first = (unrolled, [layer, layer]) if layers == "unrolled" else (scan, both)
    compiled = jax.jit(fn, donate_argnums=0).lower(first, new, new, slots).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 1 << 20


def test_a_donated_cache_is_gone() -> None:
    args, _ = inputs(CASES["one"])
    jax.jit(write_kv, donate_argnums=0)(*args)
    assert args[0].is_deleted()


def test_no_tokens_leave_the_cache() -> None:
    args, _ = inputs(Case(tokens=()))
    assert write_kv(*args) is args[0]


@pytest.mark.parametrize("bad", [9 * 8, -8])
def test_debug_mode_reports_a_slot_outside(bad: int) -> None:
    (cache, k, v, slots), _ = inputs(Case(tokens=((0, 0), (1, 0))))
    checked = checkify.checkify(write_kv, errors=checkify.user_checks)
    with debug_checks(True):
        error, _ = checked(cache, k, v, slots)
        error.throw()
        error, _ = checked(cache, k, v, slots.at[0].set(bad))
    with pytest.raises(checkify.JaxRuntimeError, match="outside"):
        error.throw()


def test_bad_arguments_are_named() -> None:
    (cache, k, v, slots), _ = inputs(Case(tokens=((1, 0), (1, 1))))
    with pytest.raises(ValueError, match=r"k.shape"):
        write_kv(cache, k, v[:1], slots)
    with pytest.raises(ValueError, match=r"slots.shape"):
        write_kv(cache, k, v, slots[:1])
    with pytest.raises(ValueError, match=r"slots has dtype"):
        write_kv(cache, k, v, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"KV heads"):
        write_kv(cache, k[:, :2], v[:, :2], slots)
    with pytest.raises(ValueError, match=r"rows of at least"):
        write_kv(cache[..., :64], k, v, slots)


def test_scales_and_the_cache_must_go_together() -> None:
    (cache, k, v, slots), scales = inputs(Case(tokens=((1, 0),), dtype="int8"))
    with pytest.raises(ValueError, match="needs k_scale and v_scale"):
        write_kv(cache, k, v, slots)
    with pytest.raises(ValueError, match="together"):
        write_kv(cache, k, v, slots, k_scale=scales["k_scale"])
    with pytest.raises(ValueError, match="expected float32"):
        write_kv(cache, k, v, slots, k_scale=scales["k_scale"][:2], v_scale=scales["v_scale"])
    with pytest.raises(ValueError, match="takes no scales"):
        cache = cache.astype(jnp.bfloat16)
        write_kv(cache, k, v, slots, k_scale=scales["k_scale"], v_scale=scales["v_scale"])


def test_fp8_without_scales_is_cut_off_and_not_nan() -> None:
    (cache, k, v, slots), _ = inputs(Case(tokens=((1, 0),), dtype="float8_e4m3fn"))
    assert np.isnan(np.float32(jnp.float32(500).astype(jnp.float8_e4m3fn)))
    got = write_kv(cache, k * 0 + 500, v * 0 - 1e9, slots)[1, :, 0].astype(jnp.float32)
    np.testing.assert_array_equal(got[:, :64], 448)
    np.testing.assert_array_equal(got[:, 64:], -448)


def test_quantising_rounds_half_to_even_and_cuts_off() -> None:
    x = jnp.array([[0.5, 1.5, -2.5, 1000.0, -1000.0, 126.6]])
    got = quantise(x, jnp.ones(1), jnp.int8)
    np.testing.assert_array_equal(got, [[0, 2, -2, 127, -127, 127]])
    np.testing.assert_array_equal(quantise(x, jnp.full(1, 0.5), jnp.int8)[0, :2], [1, 3])
    with pytest.raises(ValueError, match="bfloat16 is not one of"):
        quantise(x, jnp.ones(1), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"scale.shape"):
        quantise(x, jnp.ones(2), jnp.int8)


@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_of_the_data_fit_it(dtype: str) -> None:
    k, v = jax.random.normal(jax.random.key(0), (2, 50, 3, 16))
    k = k.at[:, 1].set(0)
    k_scale, v_scale = kv_scales(k, v, dtype)
    assert k_scale[1] == 1
    for x, scale in ((k, k_scale), (v, v_scale)):
        number = quantise(x, scale, dtype).astype(jnp.float32)
        peaks = np.asarray(jnp.max(jnp.abs(number), axis=(0, 2)))
        np.testing.assert_array_equal(peaks[[0, 2]], LARGEST[dtype])
        # Half a step of int8; e4m3 keeps 3 bits after the first.
        step = 0.5 * scale[:, None] if dtype == "int8" else jnp.abs(x) / 16 + scale[:, None] / 512
        assert (jnp.abs(number * scale[:, None] - x) <= step * 1.001).all()
    with pytest.raises(ValueError, match="float32 is not one of"):
        kv_scales(k, v, jnp.float32)


@pytest.mark.parametrize(
    ("implementation", "shape", "dtype", "message"),
    [
        (V6E, (4, 1, 8, 80), "bfloat16", "multiple of 128"),
        (V6E, (4, 1, 3, 128), "bfloat16", "multiple of 4"),
        (V6E, (4, 1, 8, 128), "float16", "float16"),
        (H200, (4, 1, 8, 20), "bfloat16", "multiple of 32"),
    ],
)
def test_a_kernel_says_what_it_cannot_serve(
    implementation: Implementation, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    if implementation is H200 and JAX_VERSION < (0, 11):
        message = "older than 0.11"
    new = jnp.zeros((1, 1, 10))
    args = [jnp.zeros(shape, dtype), new, new, jnp.array([9], jnp.int32)]
    with pytest.raises(NotImplementedError, match=message):
        run(args, {}, implementation)


def test_a_chip_without_the_kernels_says_so() -> None:
    args, scales = inputs(CASES["one"])
    interpretation = Interpretation(chip=CHIPS["T4"])
    with interpret_kernels(interpretation), pytest.raises(NotImplementedError, match="sm_80"):
        write_kv(*args, **scales, implementation="mosaic_gpu")


def test_the_docstring_example_runs() -> None:
    module = importlib.import_module("octavo.pallas_kernels.quantise")
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
