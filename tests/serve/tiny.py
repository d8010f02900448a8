"""A Llama of two small layers with random weights behind the demo model's real tokenizer.

Engine behaviour that does not depend on what a model knows is tested on it, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo.models import Llama, LlamaConfig, LoadedModel, LoraAdapter
from octavo.models.lora import lora_shapes
from octavo.paged import packed_batch
from octavo.pallas_kernels import cache_shape, init_kv_cache
from octavo.serve import Engine, EngineConfig, Logprob


def tiny_model(
    smollm2: LoadedModel, *, max_context_len: int = 512, hidden_size: int = 48
) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=smollm2.config.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_context_len=max_context_len,
        tie_embeddings=False,  # tied and untrained, it would repeat its last token for ever
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    # At the usual scale of a fresh model, context would hardly change what comes next.
    for layer in model.layers:
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    return replace(smollm2, name="tiny", model=model, config=config, fingerprint="tiny")


def tiny_engine(loaded: LoadedModel, **config) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 256, "block_size": 8, "max_num_seqs": 4}
    own = {"max_num_batched_tokens": 32, "compilation_cache_dir": "", "restore_policy": "always"}
    settings |= own | config
    return Engine(loaded, EngineConfig(**settings))


RANK, SLOTS = 4, 3
# Engines with adapters have one size, and few programs.
SIZE = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def lora_engine(tiny: LoadedModel, **config) -> Engine:
    return tiny_engine(tiny, **(SIZE | {"max_loras": SLOTS, "max_lora_rank": RANK} | config))


def tiny_adapter(config: LlamaConfig, seed: int, rank: int = 3) -> LoraAdapter:
    rng = np.random.default_rng(seed)

    def factor(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    return LoraAdapter(
        config=config,
        layers=[
            {t: (factor(n, rank), factor(rank, out)) for t, (n, out) in lora_shapes(config).items()}
            for _ in range(config.num_layers)
        ],
    )


def next_tokens(tiny: LoadedModel, length: int = 128) -> Callable[[list[int]], np.ndarray]:
    """From up to `length` tokens to the log-distribution of each next one, `float64[n, V]`."""
    size = 16

    @jax.jit
    def logits(tokens: jax.Array, count: jax.Array) -> jax.Array:
        shape = cache_shape(1 + length // size, 2, size, 16, "cpu")
        tables = jnp.arange(1, 1 + length // size, dtype=jnp.int32)[None]
        batch, position = packed_batch(
            tables, count[None], count[None], num_tokens=length, block_size=size
        )
        batch = replace(batch, logit_rows=jnp.arange(length, dtype=jnp.int32))
        return tiny.model(tokens, position, init_kv_cache(2, shape, jnp.float32), batch)[0]

    def distribution(tokens: list[int]) -> np.ndarray:
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        out = np.asarray(logits(padded, np.int32(len(tokens))), np.float64)[: len(tokens)]
        top = out.max(axis=-1, keepdims=True)
        return out - top - np.log(np.exp(out - top).sum(axis=-1, keepdims=True))

    return distribution


def assert_logprob(row: np.ndarray, token: int, found: Logprob) -> None:
    """That `found` is the token's in a log-distribution `[V]`, up to what rounding can do."""
    own, close = row[token], 1e-4
    assert abs(found.logprob - own) < 2 * close
    assert 1 + (row > own + close).sum() <= found.rank <= (row >= own - close).sum()
