"""SmolLM2 against Hugging Face transformers: logits, every position's choice, continuations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo.models import LoadedModel
from octavo.paged import packed_batch
from octavo.pallas_kernels import cache_shape, init_kv_cache
from octavo.serve import Engine, SamplingParams

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "smollm2_reference.npz")
LENGTHS = (5, 37, 300, 1500)
BLOCK_SIZE, CHUNK = 16, 512


@pytest.fixture(scope="module")
def logits_of(smollm2: LoadedModel):
    """All logits of a prompt, computed in packed chunks over shuffled blocks."""
    config = smollm2.config
    num_blocks = 1536 // BLOCK_SIZE + 1
    shape = cache_shape(num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_size, "cpu")
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    table = ids[None]

    graphdef, state = nnx.split(smollm2.model)

    @jax.jit
    def chunk(model_state, tokens, context_len, query_len, cache):
        model = nnx.merge(graphdef, model_state)
        batch, position = packed_batch(
            jnp.asarray(table),
            context_len[None],
            query_len[None],
            num_tokens=CHUNK,
            block_size=BLOCK_SIZE,
        )
        batch = dataclasses.replace(batch, logit_rows=jnp.arange(CHUNK))
        return model(tokens, position, cache, batch)

    def run(prompt: np.ndarray) -> np.ndarray:
        cache = init_kv_cache(config.num_layers, shape, "float32")
        parts = []
        for begin in range(0, len(prompt), CHUNK):
            part = prompt[begin : begin + CHUNK]
            tokens = np.zeros(CHUNK, np.int32)
            tokens[: len(part)] = part
            end = np.int32(begin + len(part))
            logits, cache = chunk(state, tokens, end, np.int32(len(part)), cache)
            parts.append(np.asarray(logits[: len(part)]))
        return np.concatenate(parts)

    return run


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_agree_at_every_position(logits_of, length: int) -> None:
    ids = REFERENCE[f"ids_{length}"]
    logits = logits_of(ids)
    tail = logits[-min(length, 8) :]
    np.testing.assert_allclose(logits[-1], REFERENCE[f"logits_last_{length}"], atol=2e-3, rtol=0)
    some = REFERENCE[f"logits_tail_every_16th_{length}"]
    np.testing.assert_allclose(tail[:, ::16], some, atol=2e-3, rtol=0)
    np.testing.assert_array_equal(logits.argmax(axis=1), REFERENCE[f"argmax_{length}"])
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(logprobs[:-1], ids[1:, None].astype(np.int64), axis=1)[:, 0]
    np.testing.assert_allclose(chosen, REFERENCE[f"logprob_next_{length}"], atol=2e-3, rtol=0)


@pytest.mark.slow
def test_greedy_continuations_are_the_reference_tokens(smollm2: LoadedModel) -> None:
    engine = Engine(smollm2)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [REFERENCE[f"ids_{n}"].tolist() for n in LENGTHS]
    want = [tuple(REFERENCE[f"greedy_{n}"].tolist()) for n in LENGTHS]
    cold = engine.generate(prompts, params)
    warm = engine.generate(prompts, params)
    assert [c.token_ids for c in cold] == want
    assert [c.token_ids for c in warm] == want
    assert [c.num_cached_tokens for c in warm] == [4, 36, 299, 1499]
