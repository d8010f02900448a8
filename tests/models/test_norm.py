"""The root-mean-square norm, and rows of it that must not know of one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.norm import rms_norm


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shape", [(3, 1), (5, 48), (2, 3, 64), (40, 576), (7, 1000)])
def test_is_the_papers(shape: tuple[int, ...], batch_invariant: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape), rng.standard_normal(shape[-1])
    expected = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 0.1) * weight
    narrow = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    got = rms_norm(*narrow, 0.1, batch_invariant=batch_invariant)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_keeps_the_dtype_of_what_it_norms() -> None:
    x = jnp.full((2, 64), 300, jnp.bfloat16)  # its square needs float32
    for batch_invariant in (False, True):
        got = rms_norm(x, jnp.ones(64, jnp.bfloat16), 0.0, batch_invariant=batch_invariant)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.astype(jnp.float32), 1)


@pytest.mark.parametrize("width", [64, 576, 2048])
def test_rows_do_not_depend_on_their_number(width: int) -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((65, width)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal(width), jnp.float32)

    @jax.jit
    def norm(x: jax.Array) -> jax.Array:
        # As in a layer: what is added before may be fused with it.
        return rms_norm(x + 0.1 * x, weight, 1e-5, batch_invariant=True)

    alone = np.concatenate([norm(x[i : i + 1]) for i in range(len(x))])
    for count in (2, 7, 8, 16, 33, 65):
        np.testing.assert_array_equal(norm(x[:count]), alone[:count])
