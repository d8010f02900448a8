"""The static options of `paged_attention`, as every implementation receives them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Resolved options: see `octavo.pallas_kernels.paged_attention` for their meaning."""

    max_query_len: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool = True
    batch_invariant: bool = False

    def query_position(
        self, context_len: jax.Array, query_len: jax.Array, index: jax.Array
    ) -> jax.Array:
        """Last key position that query `index` of a sequence's `query_len` queries sees."""
        return context_len - query_len + index if self.causal else context_len - 1

    def logits(self, scores: jax.Array) -> jax.Array:
        """Scale and cap raw `q . k` scores, in float32."""
        scores = scores * jnp.float32(self.scale)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return scores

    def visible(self, key_position: jax.Array, query_position: jax.Array) -> jax.Array:
        """Whether a key at one position is seen from another (shapes broadcast)."""
        seen = key_position <= query_position
        if self.sliding_window is not None:
            seen &= key_position > query_position - self.sliding_window
        return seen
