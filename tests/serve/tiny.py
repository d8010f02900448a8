"""A Llama of two small layers with random weights behind the demo model's real tokenizer.

Engine behaviour that does not depend on what a model knows is tested on it, in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flax import nnx

from octavo.models import Llama, LlamaConfig, LoadedModel
from octavo.serve import Engine, EngineConfig


def tiny_model(smollm2: LoadedModel) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=smollm2.config.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_context_len=512,
        tie_embeddings=False,  # tied and untrained, it would repeat its last token for ever
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    # At the usual scale of a fresh model, context would hardly change what comes next.
    for layer in model.layers:
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    return replace(smollm2, name="tiny", model=model, config=config, fingerprint="tiny")


def tiny_engine(loaded: LoadedModel, **config) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 256, "block_size": 8, "max_num_seqs": 8}
    settings |= {"max_num_batched_tokens": 64, "compilation_cache_dir": ""} | config
    return Engine(loaded, EngineConfig(**settings))
