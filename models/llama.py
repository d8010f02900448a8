"""Llama-family decoder in Flax NNX: the modules hold weights, the KV cache passes through.

Weights are fused the way they are used: queries, keys and values of one KV head lie together
(`qkv [D, K, G+2, H]`), and so do gate and up (`gate_up [D, 2, F]`), so that each is one matrix
product and tensor parallelism cuts along K and F.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..paged import PagedBatch, cached_attention
from ..pallas_kernels import cpu_kernels, linear
from .config import LlamaConfig
from .lora import LayerLora, LoraBatch, LoraStack, add_lora
from .norm import rms_norm
from .packed import PackedParameter, pack_parameter
from .quantized import QuantizedWeight, check_quantization, quantize_parameter
from .rope import apply_rope, rope_angles

KVCache = tuple[jax.Array, ...]
_init = nnx.initializers.normal(0.02)


class LlamaLayer(nnx.Module):
    """One decoder layer: attention and SwiGLU, each behind an RMS norm."""

    def __init__(self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        width, mlp = config.hidden_size, config.intermediate_size
        heads, groups, head = config.num_kv_heads, config.num_groups, config.head_size

        def normal(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(_init(rngs.params(), shape, dtype))

        def zeros(present: bool, *shape: int) -> nnx.Param[jax.Array] | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if present else None

        def ones(present: bool, *shape: int) -> nnx.Param[jax.Array] | None:
            return nnx.Param(jnp.ones(shape, dtype)) if present else None

        self.config = config
        self.attn_norm = nnx.Param(jnp.ones((width,), dtype))
        self.qkv = normal(width, heads, groups + 2, head)
        self.qkv_bias = nnx.data(zeros(config.attention_bias, heads, groups + 2, head))
        self.q_norm = nnx.data(ones(config.qk_norm, head))
        self.k_norm = nnx.data(ones(config.qk_norm, head))
        self.out = normal(heads, groups, head, width)
        self.out_bias = nnx.data(zeros(config.attention_out_bias, width))
        self.mlp_norm = nnx.Param(jnp.ones((width,), dtype))
        self.gate_up = normal(width, 2, mlp)
        self.gate_up_bias = nnx.data(zeros(config.mlp_bias, 2, mlp))
        self.down = normal(mlp, width)
        self.down_bias = nnx.data(zeros(config.mlp_bias, width))

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        kv_cache: jax.Array | None,
        batch: PagedBatch | None,
        lora: LayerLora | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`x: [T, D]`, one layer's cache `[P, K, B, ROW]` -> the same two.

        Without cache and batch, `x` is one whole sequence.
        """
        attended, kv_cache = self._attention(x, angles, kv_cache, batch, lora)
        x = x + attended
        return x + self._mlp(x, batch, lora), kv_cache

    def _attention(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        kv_cache: jax.Array | None,
        batch: PagedBatch | None,
        lora: LayerLora | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        config = self.config
        invariant = batch is not None and batch.batch_invariant
        norm = partial(rms_norm, eps=config.rms_norm_eps, batch_invariant=invariant)
        normed = norm(x, self.attn_norm[...])
        qkv = _linear(normed, self.qkv.get_value(), self.qkv_bias, batch)
        q = qkv[:, :, :-2].reshape(x.shape[0], config.num_heads, config.head_size)
        q, k, v = add_lora(lora, "qkv", normed, (q, qkv[:, :, -2], qkv[:, :, -1]), invariant)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm[...]), norm(k, self.k_norm[...])
        q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        window = config.sliding_window
        if kv_cache is None or batch is None:
            near = None if window is None else (window - 1, 0)
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=near)
        else:
            out, kv_cache = cached_attention(q, k, v, kv_cache, batch, sliding_window=window)
        out = out.reshape(x.shape[0], -1)
        projected = _linear(out, self.out.get_value(), self.out_bias, batch, contracted=3)
        (attended,) = add_lora(lora, "out", out, (projected,), invariant)
        return attended, kv_cache

    def _mlp(self, x: jax.Array, batch: PagedBatch | None, lora: LayerLora | None) -> jax.Array:
        invariant = batch is not None and batch.batch_invariant
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, self.mlp_norm[...], eps, batch_invariant=invariant)
        gate_up = _linear(normed, self.gate_up.get_value(), self.gate_up_bias, batch)
        gate, up = add_lora(lora, "gate_up", normed, (gate_up[:, 0], gate_up[:, 1]), invariant)
        hidden = jax.nn.silu(gate) * up
        projected = _linear(hidden, self.down.get_value(), self.down_bias, batch)
        (out,) = add_lora(lora, "down", hidden, (projected,), invariant)
        return out


class Llama(nnx.Module):
    """A Llama-family language model over a paged KV cache.

    Attributes:
        config: sizes and switches.
        embed: `[V, D]`; also the output head when embeddings are tied.
        layers: L decoder layers.
        norm: `[D]`.
        head: `[V, D]`, or None when embeddings are tied.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(_init(rngs.params(), shape, dtype))
        self.layers = nnx.List(
            [LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.head = nnx.data(
            None if config.tie_embeddings else nnx.Param(_init(rngs.params(), shape, dtype))
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations, and of the weights that are not quantised."""
        return self.norm[...].dtype

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv_cache: KVCache,
        batch: PagedBatch,
        lora: LoraBatch | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Run the packed tokens through the model, writing their keys and values to the cache.

        Args:
            tokens: `int32[T]`; a padding token may be any id in the vocabulary.
            positions: `int32[T]` position of each token in its sequence.
            kv_cache: L arrays `[P, K, B, ROW]`; donate them.
            batch: which blocks, slots and queries belong to which sequence.
            lora: the adapters that the tokens take, if any.

        Returns:
            `(logits float32[R, V], kv_cache)`, logits for the tokens in `batch.logit_rows`.
        """
        x, kv_cache = self.hidden(tokens, positions, kv_cache, batch, lora)
        return self.logits(x[batch.logit_rows], batch.batch_invariant), kv_cache

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv_cache: KVCache,
        batch: PagedBatch,
        lora: LoraBatch | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """As a call, but returns what the last layer makes of every token, `[T, D]`."""
        x = self._embedded(tokens)
        angles = rope_angles(positions, self.config)
        caches: list[Any] = []
        for i, (layer, cache) in enumerate(zip(self.layers, kv_cache, strict=True)):
            own = None if lora is None else (lora.stack[i], lora.tokens)
            x, cache = _run_layer(*nnx.split(layer), x, angles, cache, batch, own)
            caches.append(cache)
        return x, tuple(caches)

    def sequence_logits(self, tokens: jax.Array, lora: LoraStack | None = None) -> jax.Array:
        """Logits `float32[T, V]` after each token of one whole sequence, without a cache.

        They have a gradient, which those of the paged model have not. To train an adapter, take it
        in `lora`, a stack of one slot.
        """
        x = self._embedded(tokens)
        angles = rope_angles(jnp.arange(tokens.shape[0], dtype=jnp.int32), self.config)
        batch = None if lora is None else LoraBatch.of(lora, jnp.ones_like(tokens))
        for i, layer in enumerate(self.layers):
            own = None if batch is None else (batch.stack[i], batch.tokens)
            x, _ = _run_layer(*nnx.split(layer), x, angles, None, None, own)
        return self._logits(x, False, "xla")

    def logits(self, x: jax.Array, batch_invariant: bool = False) -> jax.Array:
        """Logits `float32[R, V]` of hidden states `x: [R, D]`."""
        return self._logits(x, batch_invariant, None)

    def _logits(self, x: jax.Array, batch_invariant: bool, implementation: str | None) -> jax.Array:
        eps = self.config.rms_norm_eps
        x = rms_norm(x, self.norm[...], eps, batch_invariant=batch_invariant)
        head = (self.embed if self.head is None else self.head).get_value()
        product = partial(linear, batch_invariant=batch_invariant, implementation=implementation)
        if isinstance(head, PackedParameter):
            return product(x.astype(jnp.float32), head.weight)
        if isinstance(head, QuantizedWeight):
            return product(x.astype(jnp.float32), head.words, head.scale)
        return product(x, head, transposed=True)

    def quantized(self, quantization: str | None) -> Llama:
        """This model with the weights of its products in `"int8"`; None leaves it as it is.

        Adapters on top, norms, biases and an embedding that is not the output head stay as they
        are.

        Raises:
            ValueError: there is no such quantisation.
        """
        check_quantization(quantization)
        if quantization is None:
            return self
        return self._with_each(lambda name, value: quantize_parameter(name, value, self.config))

    def packed(self) -> Llama:
        """This model with its weights as the kernels of this machine read them fastest.

        A copy of the weights that products read, where there are such kernels (on a CPU, in
        float32); else the model itself.
        """
        if self.dtype != jnp.float32 or cpu_kernels() is None:
            return self
        return self._with_each(lambda name, value: pack_parameter(name, value, self.config))

    def _with_each(self, fn: Callable[[str, Any], Any]) -> Llama:
        """This model with `fn(name, value)` for each parameter."""
        graphdef, state = nnx.split(self)
        changed = {
            path: old.replace(fn(str(path[-1]), old.get_value()))
            for path, old in nnx.to_flat_state(state)
        }
        return nnx.merge(graphdef, nnx.from_flat_state(changed))

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        embed = self.embed.get_value()
        if isinstance(embed, PackedParameter):
            return embed.weight.outputs(tokens).astype(self.dtype)
        if isinstance(embed, QuantizedWeight):
            return embed.outputs(tokens).astype(self.dtype)
        return embed[tokens]


# Traced once and called L times: without this the trace, which no compilation cache saves, takes
# L times as long.
@partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: nnx.GraphDef[LlamaLayer],
    state: nnx.State,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    kv_cache: jax.Array | None,
    batch: PagedBatch | None,
    lora: LayerLora | None,
) -> tuple[jax.Array, jax.Array | None]:
    return nnx.merge(graphdef, state)(x, angles, kv_cache, batch, lora)


def _linear(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight | PackedParameter,
    bias: nnx.Param[jax.Array] | None,
    batch: PagedBatch | None,
    *,
    contracted: int = 1,
) -> jax.Array:
    """`x: [T, in]` times a weight whose first `contracted` axes are `in`, as one 2-D product."""
    scale, own = None, weight
    if isinstance(weight, PackedParameter):
        out_shape, own = weight.out_shape, weight.weight
    elif isinstance(weight, QuantizedWeight):
        out_shape, own, scale = weight.out_shape, weight.words, weight.scale
    else:
        out_shape, own = weight.shape[contracted:], weight.reshape(x.shape[1], -1)
    invariant = batch is not None and batch.batch_invariant
    # What has no cache is to have a gradient.
    kernel = "xla" if batch is None else None
    y = linear(x, own, scale, batch_invariant=invariant, implementation=kernel)
    y = y.reshape(x.shape[0], *out_shape)
    return y if bias is None else y + bias[...]
