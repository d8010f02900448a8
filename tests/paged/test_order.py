"""Sorting by one packed array gives what a stable sort gives, at the edges of 32 bits as well."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from octavo.paged.order import order_of

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize("size", [1, 2, 33, 1024])
@pytest.mark.parametrize("bound", ["1", "few", "as many as fit", "one more"])
def test_places_are_those_of_a_stable_sort(size: int, bound: str) -> None:
    fit = min((1 << 32) // size, (1 << 31) - 2)
    most = {"1": 1, "few": 5, "as many as fit": fit, "one more": fit + 1}[bound]
    rng = np.random.default_rng(size)
    keys = rng.integers(0, most, size).astype(np.int32)
    keys[rng.integers(0, size, size // 4)] = most - 1
    order = jax.jit(order_of, static_argnums=1)(keys, most)
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
    assert order.dtype == np.int32
