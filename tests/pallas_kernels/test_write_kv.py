"""`write_kv`: every implementation against NumPy, on a cache full of NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo.pallas_kernels import debug_checks, write_kv

IMPLEMENTATIONS = ("reference", "xla")
P, K, B, H = 9, 3, 4, 8
SHAPE = (P, K, B, 2 * H)

# Slots of the tokens of one call; block 0 is padding, blocks beyond the pool are dropped.
CASES = {
    "one": [5],
    "opens-a-block": [4 * B],
    "fills-two-blocks": [7, *range(2 * B, 3 * B), 5 * B],
    "padding": [0, 1, 3, 2 * B, 0],
    "all-padding": [0, 0],
    "permuted": [6 * B + 1, 3 * B, 6 * B, 3 * B + 1],
    "outside": [P * B, 10**6, -1, -(10**6), 2 * B + 1],
    "none": [],
}


def expected(cache: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list[int]) -> np.ndarray:
    cache = cache.copy()
    live = [s for s in slots if B <= s < P * B]
    for slot in live:
        if slot % B == 0:
            cache[slot // B] = 0
    for i, slot in enumerate(slots):
        if slot in live:
            cache[slot // B, :, slot % B, :H] = k[i]
            cache[slot // B, :, slot % B, H : 2 * H] = v[i]
    return cache


def inputs(slots: list[int], dtype: str = "float32", width: int = 2 * H):
    rng = np.random.default_rng(1)
    cache = np.full((P, K, B, width), np.nan, np.float32)
    k, v = rng.normal(size=(2, len(slots), K, H)).astype(np.float32)
    return jnp.asarray(cache, dtype), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_matches_numpy_to_the_bit(name: str, implementation: str) -> None:
    cache, k, v, slots = inputs(CASES[name])
    got = jax.jit(lambda *a: write_kv(*a, implementation=implementation))(cache, k, v, slots)
    want = expected(np.asarray(cache), np.asarray(k), np.asarray(v), CASES[name])
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wide_rows_and_other_dtypes_are_cast(implementation: str) -> None:
    slots = CASES["fills-two-blocks"]
    cache, k, v, s = inputs(slots, "bfloat16", width=128)
    got = write_kv(cache, k, v, s, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    block = np.asarray(got[2].astype(jnp.float32))
    np.testing.assert_array_equal(block[:, :, 2 * H :], 0)
    want = np.asarray(v[1:5].astype(jnp.bfloat16).astype(jnp.float32)).swapaxes(0, 1)
    np.testing.assert_array_equal(block[:, :, H : 2 * H], want)


@pytest.mark.parametrize("layers", ["unrolled", "loop"])
def test_a_donated_cache_is_not_copied(layers: str) -> None:
    cache = jax.ShapeDtypeStruct((2048, 3, 16, 128), jnp.float32)
    new = jax.ShapeDtypeStruct((16, 3, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((16,), jnp.int32)

    def unrolled(caches, k, v, s):
        return [write_kv(c, k, v, s) for c in caches]

    def loop(cache, k, v, s):
        return jax.lax.fori_loop(0, 3, lambda i, c: write_kv(c, k, v, s), cache)

    fn, first = (unrolled, [cache, cache]) if layers == "unrolled" else (loop, cache)
    compiled = jax.jit(fn, donate_argnums=0).lower(first, new, new, slots).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 1 << 20  # the cache is 48 MiB


def test_a_donated_cache_is_gone() -> None:
    cache, k, v, slots = inputs(CASES["permuted"])
    jax.jit(write_kv, donate_argnums=0)(cache, k, v, slots)
    assert cache.is_deleted()


@pytest.mark.parametrize("bad", [P * B, -B])
def test_debug_mode_reports_a_slot_outside(bad: int) -> None:
    cache, k, v, _ = inputs([0, 1])
    checked = checkify.checkify(write_kv, errors=checkify.user_checks)
    with debug_checks(True):
        error, _ = checked(cache, k, v, jnp.array([0, B], jnp.int32))
        error.throw()
        error, _ = checked(cache, k, v, jnp.array([bad, B], jnp.int32))
    with pytest.raises(checkify.JaxRuntimeError, match="outside"):
        error.throw()


def test_bad_arguments_are_named() -> None:
    cache, k, v, slots = inputs([4, 5])
    with pytest.raises(ValueError, match=r"k.shape"):
        write_kv(cache, k, v[:1], slots)
    with pytest.raises(ValueError, match=r"slots.shape"):
        write_kv(cache, k, v, slots[:1])
    with pytest.raises(ValueError, match=r"slots has dtype"):
        write_kv(cache, k, v, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"KV heads"):
        write_kv(cache, k[:, :2], v[:, :2], slots)
    with pytest.raises(ValueError, match=r"rows of at least"):
        write_kv(cache[..., :H], k, v, slots)
