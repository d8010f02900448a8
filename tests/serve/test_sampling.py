"""Sampling against NumPy: which tokens may come, how often, and that rows keep to themselves."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.serve.sampling import SamplingRows, sample

V = 50


def rows(count: int, **values) -> SamplingRows:
    base = {
        "temperature": np.ones(count, np.float32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "seed": np.arange(count, dtype=np.uint32),
        "index": np.zeros(count, np.int32),
    }
    for name, value in values.items():
        base[name] = np.full(count, value, base[name].dtype)
    return SamplingRows(**{name: jnp.asarray(value) for name, value in base.items()})


def allowed(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, with nothing tied."""
    probs = np.exp(logits - logits.max())
    keep = probs >= min_p
    order = [i for i in np.argsort(-probs) if keep[i]]
    order = order[:top_k] if top_k else order
    total, chosen = sum(probs[order]), []
    for i in order:
        chosen.append(int(i))
        if sum(probs[chosen]) >= top_p * total:
            break
    return set(chosen)


LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2


@pytest.mark.parametrize("top_k", [0, 1, 7, V, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_exactly_the_allowed_tokens_are_drawn(top_k: int, top_p: float, min_p: float) -> None:
    count = 3000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (count, V))
    want = allowed(LOGITS, top_k, top_p, min_p)
    drawn = np.asarray(sample(logits, rows(count, top_k=top_k, top_p=top_p, min_p=min_p)))
    assert set(drawn.tolist()) <= want
    probs = np.exp(LOGITS.astype(np.float64))
    share = {i: probs[i] / sum(probs[j] for j in want) for i in want}
    for i in want:
        sigma = np.sqrt(share[i] * (1 - share[i]) / count)
        assert abs((drawn == i).mean() - share[i]) < 5 * sigma + 1e-9


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (2000, V))
    best = int(LOGITS.argmax())
    freq = [
        float((sample(logits, rows(2000, temperature=t)) == best).mean()) for t in (0, 0.5, 1, 5)
    ]
    assert freq[0] == 1
    assert freq[0] > freq[1] > freq[2] > freq[3]
    probs = np.exp(LOGITS / 0.5)
    assert abs(freq[1] - probs[best] / probs.sum()) < 0.05


@pytest.mark.parametrize("vocab_size", [1, 2, 511, 512, 513, 1024, 1700])
def test_greedy_takes_the_first_of_the_largest(vocab_size: int) -> None:
    logits = np.random.default_rng(0).integers(-3, 2, (200, vocab_size)).astype(np.float32)
    logits[0] = -np.inf
    logits[1] = -np.inf
    logits[1, -1] = 0
    logits[2] = 7
    drawn = sample(jnp.asarray(logits), rows(200, temperature=0))
    np.testing.assert_array_equal(drawn, logits.argmax(axis=1))


def test_a_row_depends_on_its_own_seed_and_index_only() -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, V)).astype(np.float32))
    mixed = replace(rows(8), temperature=jnp.asarray([0, 1, 2, 0, 1, 1, 1, 1], jnp.float32))
    together = np.asarray(sample(logits, mixed))
    for i in range(8):
        alone = sample(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], mixed))
        assert int(alone[0]) == together[i]
    later = np.asarray(sample(logits, replace(mixed, index=mixed.index + 1)))
    assert (later != together)[mixed.temperature > 0].any()
    assert (later == together)[mixed.temperature == 0].all()


def test_tokens_tied_with_the_last_kept_stay() -> None:
    logits = jnp.broadcast_to(jnp.asarray([1.0, 1.0, 0.0, -5.0]), (500, 4))
    assert set(np.asarray(sample(logits, rows(500, top_k=1))).tolist()) == {0, 1}


def test_signs_zeros_and_infinities_are_ordered() -> None:
    logits = jnp.broadcast_to(jnp.asarray([-jnp.inf, -0.0, 0.0, -1.0, -2.0]), (500, 5))
    drawn = set(np.asarray(sample(logits, rows(500, top_k=3))).tolist())
    assert drawn == {1, 2, 3}
