"""How large the KV cache is, and how long a context it serves."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..models import LlamaConfig
from ..pallas_kernels import cache_shape
from .config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The sizes of the KV cache, resolved from model and configuration.

    Attributes:
        shape: `(P, K, B, ROW)` of one layer.
        dtype: of the cache.
        max_model_len: longest context served, in tokens.
        blocks_per_seq: width of a block table, M.
    """

    shape: tuple[int, int, int, int]
    dtype: jnp.dtype
    max_model_len: int
    blocks_per_seq: int

    @classmethod
    def of(cls, model: LlamaConfig, config: EngineConfig, weights_dtype: jnp.dtype) -> CacheLayout:
        """Resolve the sizes.

        Raises:
            ValueError: the context is longer than the model's, or the memory holds no block.
        """
        max_len = config.max_model_len or model.max_context_len
        if max_len > model.max_context_len:
            raise ValueError(
                f"max_model_len={max_len} must be at most the model's {model.max_context_len}"
            )
        dtype = cache_dtype(config, weights_dtype)
        block = cache_shape(
            2, model.num_kv_heads, config.block_size, model.head_size, jax.default_backend()
        )[1:]
        block_bytes = model.num_layers * int(np.prod(block)) * dtype.itemsize
        num_blocks = config.num_blocks or int(config.kv_cache_gib * 2**30) // block_bytes
        if num_blocks < 2:
            raise ValueError(
                f"kv_cache_gib={config.kv_cache_gib} holds {num_blocks} blocks of "
                f"{block_bytes / 2**20:.2f} MiB; at least 2 are needed"
            )
        return cls(
            shape=(num_blocks, *block),
            dtype=dtype,
            max_model_len=max_len,
            blocks_per_seq=-(-max_len // config.block_size),
        )


def cache_dtype(config: EngineConfig, weights_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values."""
    auto = config.kv_cache_dtype == "auto"
    return jnp.dtype(weights_dtype if auto else config.kv_cache_dtype)
