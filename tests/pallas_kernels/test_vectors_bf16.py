"""Pairs of bfloat16 in Numba: how they are rounded, laid side by side, multiplied."""

from __future__ import annotations

import jax.numpy as jnp
import numba
import numpy as np
import pytest

from octavo.pallas_kernels import vectors_bf16
from octavo.pallas_kernels.vectors import load, splat, store
from octavo.pallas_kernels.xla_threads import address_of

BFLOAT16 = jnp.bfloat16


def halves(words: np.ndarray) -> np.ndarray:
    """Both numbers of each word, `[n, 2]`."""
    return words.view(BFLOAT16).reshape(-1, 2).astype(np.float32)


def use_instruction(has_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled from now on have the instruction, or not."""
    if has_instruction and not vectors_bf16.has_pair_products():
        pytest.skip("this CPU has no AVX-512 BF16")
    monkeypatch.setattr(vectors_bf16, "has_pair_products", lambda: has_instruction)


@pytest.mark.parametrize("has_instruction", [False, True])
def test_numbers_are_rounded_to_the_nearest_bfloat16(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_instruction(has_instruction, monkeypatch)

    @numba.njit
    def pack(numbers, beside, words):
        store(address_of(words), vectors_bf16.neighbours(address_of(numbers), 16))
        pairs = vectors_bf16.pairs_of(load(address_of(numbers), 32), load(address_of(beside), 32))
        store(address_of(beside), pairs)

    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(32).astype(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.2e-38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8]
    numbers[: len(special)] = special
    numbers[9:10] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)  # no number either
    beside = rng.standard_normal(32).astype(np.float32)
    words, want = np.zeros(16, np.float32), numbers.astype(BFLOAT16).astype(np.float32)
    together = np.stack([want, beside.astype(BFLOAT16).astype(np.float32)], axis=1)
    pack(numbers, beside, words)
    np.testing.assert_array_equal(halves(words), want.reshape(-1, 2))
    np.testing.assert_array_equal(np.signbit(halves(words))[0], [False, True])
    np.testing.assert_array_equal(halves(beside), together)


@pytest.mark.parametrize("has_instruction", [False, True])
def test_subnormal_numbers_become_zero_by_the_instruction_only(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_instruction(has_instruction, monkeypatch)

    @numba.njit
    def pack(numbers, words):
        same = load(address_of(numbers), 16)
        store(address_of(words), vectors_bf16.pairs_of(same, same))

    numbers, words = np.full(16, 1e-40, np.float32), np.ones(16, np.float32)
    pack(numbers, words)
    rounded = float(np.array(1e-40, BFLOAT16))
    assert 0 < rounded < 1.2e-38
    assert set(halves(words).ravel().tolist()) == {0.0 if has_instruction else rounded}


@pytest.mark.parametrize("has_instruction", [False, True])
@pytest.mark.parametrize("width", [4, 16, 64])
def test_both_products_of_a_pair_are_added(
    width: int, has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_instruction(has_instruction, monkeypatch)

    @numba.njit
    def products(start, first, second, own, out):
        pairs = vectors_bf16.load_across(address_of(first), address_of(second), width)
        total = splat(start[0], width)
        store(address_of(out), vectors_bf16.add_pairs(total, address_of(own), pairs))

    rng = np.random.default_rng(width)
    first, second = rng.standard_normal((2, width)).astype(BFLOAT16)
    own = np.array([1.5, -0.375], BFLOAT16)
    out, start = np.zeros(width, np.float32), np.array([7], np.float32)
    products(start, first.view(np.uint16), second.view(np.uint16), own.view(np.uint16), out)
    want = 7 + 1.5 * first.astype(np.float64) - 0.375 * second.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=3e-7)
