"""The cost model's view of a model that is served."""

from __future__ import annotations

from dataclasses import replace

from ..models import LlamaConfig
from ..paged.cost_model import ModelShape


def shape_of(
    config: LlamaConfig, *, param_dtype_bytes: int = 2, kv_dtype_bytes: int = 2
) -> ModelShape:
    """The sizes of a model that decide what its tokens cost."""
    return replace(
        ModelShape.dense(
            num_layers=config.num_layers,
            width=config.hidden_size,
            mlp_width=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            tie_embeddings=config.tie_embeddings,
            sliding_window=config.sliding_window,
        ),
        param_dtype_bytes=param_dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
    )
