"""The formulas against XLA's own count of the FLOPs of a compiled program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from octavo.models import Llama, LlamaConfig
from octavo.paged.cost_model import attention_flops, decode_work, head_work, prefill_flops
from octavo.serve.model_shape import shape_of

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    max_context_len=2048,
    tie_embeddings=False,
)
SHAPE = shape_of(CONFIG)


def xla_flops(function, *arguments):
    counted = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert counted is not None
    return counted["flops"]


@pytest.mark.parametrize("length", [64, 512])
def test_a_prefill_of_our_model_costs_what_xla_counts(length):
    """XLA computes what causality hides as well, and logits for every token; norms, rotations and
    softmax are the 2 % that are not counted here."""
    graphdef, weights = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    counted = xla_flops(
        lambda weights, tokens: nnx.merge(graphdef, weights).sequence_logits(tokens),
        weights,
        jnp.zeros(length, jnp.int32),
    )
    hidden = attention_flops(SHAPE, 0, length)  # as much again as is seen
    expected = prefill_flops(SHAPE, 0, length) + hidden + head_work(SHAPE, length).flops
    assert counted == pytest.approx(expected, rel=0.02)
    assert counted > expected


def attend(q, k, v, size):
    """Causal attention in blocks of `size` queries, each with the keys up to its own end only."""
    parts = []
    for stop in range(size, q.shape[0] + 1, size):
        scores = jnp.einsum("tkgh,skh->kgts", q[stop - size : stop], k[:stop])
        parts.append(jnp.einsum("kgts,skh->tkgh", scores, v[:stop]))
    return jnp.concatenate(parts)


def test_causal_attention_costs_half_of_the_square_as_xla_counts_it():
    """Blocks of 8 queries see half a block too much on average: 1/32 of 256 keys' half."""
    length, size = 256, 8
    q = jnp.zeros((length, 2, 4, 64))
    k = v = jnp.zeros((length, 2, 64))
    counted = xla_flops(lambda q, k, v: attend(q, k, v, size), q, k, v)
    expected = attention_flops(SHAPE, 0, length) / CONFIG.num_layers * (1 + size / length)
    assert counted == pytest.approx(expected, rel=0.01)


def test_attention_of_a_hit_costs_new_tokens_times_context_as_xla_counts_it():
    length, new = 512, 8
    keys = jnp.zeros((length, 2, 64))
    counted = xla_flops(
        lambda q, k, v: jnp.einsum("kgts,skh->tkgh", jnp.einsum("tkgh,skh->kgts", q, k), v),
        *(jnp.zeros((new, 2, 4, 64)), keys, keys),
    )
    unseen = 4 * 8 * 64 * new * new / 2  # what the new tokens have after them
    expected = attention_flops(SHAPE, length - new, length) / CONFIG.num_layers
    assert counted == pytest.approx(expected + unseen, rel=0.01)


def test_attention_of_a_decode_step_costs_what_xla_counts():
    context = 512

    def step(q, k, v):
        return jnp.einsum("kgs,skh->kgh", jnp.einsum("kgh,skh->kgs", q, k), v)

    keys = jnp.zeros((context, 2, 64))
    counted = xla_flops(step, jnp.zeros((2, 4, 64)), keys, keys)
    expected = decode_work(SHAPE, context).attention_flops / CONFIG.num_layers
    assert counted == pytest.approx(expected, rel=0.01)
