"""`copy_blocks`, `merge_states`, the layout and the dispatch."""

from __future__ import annotations

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from octavo.pallas_kernels import (
    cache_shape,
    copy_blocks,
    debug_checks,
    init_kv_cache,
    merge_states,
    row_width,
)


def cache_of(num_blocks: int = 7) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (num_blocks, 2, 4, 16))


COPIES = {
    "one": ([3], [5]),
    "swap-reads-before-it-writes": ([2, 5], [5, 2]),
    "padding": ([0, 3, 4], [0, 5, 0]),
    "fan-out": ([3, 3, 3], [1, 2, 6]),
    "none": ([], []),
}


@pytest.mark.parametrize("name", COPIES)
def test_copy_blocks_copies_those_and_no_others(name: str) -> None:
    src, dst = (jnp.asarray(x, jnp.int32) for x in COPIES[name])
    cache = cache_of()
    want = np.asarray(cache).copy()
    for s, d in zip(*COPIES[name], strict=True):
        if d:
            want[d] = np.asarray(cache)[s]
    np.testing.assert_array_equal(np.asarray(jax.jit(copy_blocks)(cache, src, dst)), want)


@pytest.mark.parametrize("bad", [-1, 7, 10**6])
def test_copy_blocks_never_touches_another_block(bad: int) -> None:
    cache = cache_of()
    same = copy_blocks(cache, jnp.array([3], jnp.int32), jnp.array([bad], jnp.int32))
    np.testing.assert_array_equal(np.asarray(same), np.asarray(cache))
    null = copy_blocks(cache, jnp.array([bad], jnp.int32), jnp.array([5], jnp.int32))
    np.testing.assert_array_equal(np.asarray(null[5]), np.asarray(cache[0]))
    checked = checkify.checkify(copy_blocks, errors=checkify.user_checks)
    with debug_checks(True):
        error, _ = checked(cache, jnp.array([bad], jnp.int32), jnp.array([5], jnp.int32))
    with pytest.raises(checkify.JaxRuntimeError, match="outside"):
        error.throw()


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
