"""Llama-family decoder in Flax NNX: the modules hold weights, the KV cache passes through.

Weights are fused the way they are used: queries, keys and values of one KV head lie together
(`qkv [D, K, G+2, H]`), and so do gate and up (`gate_up [D, 2, F]`), so that each is one matrix
product and tensor parallelism cuts along K and F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        attended, kv_cache = self.attend(x, angles, kv_cache, batch, lora)
        return self.finish(x, attended, lora, **_products(batch)), kv_cache

    def attend(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        kv_cache: jax.Array | None,
        batch: PagedBatch | None,
        lora: LayerLora | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The part that looks at other tokens; returns what the heads found, `[T, K*G*H]`."""
        config = self.config
        invariant = batch is not None and batch.batch_invariant
        norm = partial(rms_norm, eps=config.rms_norm_eps, batch_invariant=invariant)
        normed = norm(x, self.attn_norm[...])
        qkv = _linear(normed, self.qkv.get_value(), self.qkv_bias, **_products(batch))
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
        return out.reshape(x.shape[0], -1), kv_cache

    def finish(
        self,
        x: jax.Array,
        attended: jax.Array,
        lora: LayerLora | None,
        *,
        batch_invariant: bool,
        implementation: str | None,
    ) -> jax.Array:
        """The rest, of each token on its own, from what the heads found; returns `[T, D]`."""

        def product(name: str, x: jax.Array, contracted: int = 1) -> jax.Array:
            weight, bias = getattr(self, name).get_value(), getattr(self, f"{name}_bias")
            return _linear(
                x,
                weight,
                bias,
                batch_invariant=batch_invariant,
                implementation=implementation,
                contracted=contracted,
            )

        def adapted(name: str, x: jax.Array, *outputs: jax.Array) -> tuple[jax.Array, ...]:
            return add_lora(lora, name, x, outputs, batch_invariant)

        (projected,) = adapted("out", attended, product("out", attended, contracted=3))
        x = x + projected
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, self.mlp_norm[...], eps, batch_invariant=batch_invariant)
        gate_up = product("gate_up", normed)
        gate, up = adapted("gate_up", normed, gate_up[:, 0], gate_up[:, 1])
        hidden = jax.nn.silu(gate) * up
        (down,) = adapted("down", hidden, product("down", hidden))
        return x + down


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """How far tokens have come when no other token matters to them any more.

    The rest of the last layer is left to do, of those tokens whose logits are wanted: index this.

    Attributes:
        residual: `[T, D]`.
        attended: `[T, K*G*H]`, what the heads of the last layer found.
        adapter: `int32[T]` slot of each token's adapter, 0 for none; None without adapters.
    """

    residual: jax.Array
    attended: jax.Array
    adapter: jax.Array | None

    def __getitem__(self, rows: jax.Array | slice) -> HiddenStates:
        return jax.tree.map(lambda x: x[rows], self)


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
        hidden, kv_cache = self.hidden(tokens, positions, kv_cache, batch, lora)
        stack = None if lora is None else lora.stack
        return self.logits(hidden[batch.logit_rows], stack, batch.batch_invariant), kv_cache

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv_cache: KVCache,
        batch: PagedBatch,
        lora: LoraBatch | None = None,
    ) -> tuple[HiddenStates, KVCache]:
        """As a call, but returns what `logits` needs of every token."""
        x = self._embedded(tokens)
        angles = rope_angles(positions, self.config)
        caches: list[Any] = []
        *earlier, last = (
            (*nnx.split(layer), None if lora is None else (lora.stack[i], lora.tokens))
            for i, layer in enumerate(self.layers)
        )
        for (graphdef, state, own), cache in zip(earlier, kv_cache[:-1], strict=True):
            x, cache = _run_layer(graphdef, state, x, angles, cache, batch, own)
            caches.append(cache)
        graphdef, state, own = last
        attended, cache = nnx.merge(graphdef, state).attend(x, angles, kv_cache[-1], batch, own)
        caches.append(cache)
        adapter = None if lora is None else lora.tokens.slot
        hidden = HiddenStates(residual=x, attended=attended, adapter=adapter)
        return hidden, tuple(caches)

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

    def logits(
        self, hidden: HiddenStates, lora: LoraStack | None = None, batch_invariant: bool = False
    ) -> jax.Array:
        """Logits `float32[R, V]` of R tokens' hidden states, with the adapters that they took.

        Raises:
            ValueError: the hidden states were computed with adapters and `lora` is None, or without
                and it is not.
        """
        own = None
        if (lora is None) != (hidden.adapter is None):
            raise ValueError(
                f"{lora=} must be the stack that the hidden states were computed with, None if "
                f"without; they have {hidden.adapter=}"
            )
        if lora is not None and hidden.adapter is not None:
            own = lora[-1], LoraBatch.of(lora, hidden.adapter).tokens
        x = self.layers[-1].finish(
            hidden.residual,
            hidden.attended,
            own,
            batch_invariant=batch_invariant,
            implementation=None,
        )
        return self._logits(x, batch_invariant, None)

    def _logits(self, x: jax.Array, batch_invariant: bool, implementation: str | None) -> jax.Array:
        eps = self.config.rms_norm_eps
        x = rms_norm(x, self.norm[...], eps, batch_invariant=batch_invariant)
        head = (self.embed if self.head is None else self.head).get_value()
        product = partial(linear, batch_invariant=batch_invariant, implementation=implementation)
        if isinstance(head, PackedParameter):
            return product(x.astype(jnp.float32), head.weight, quantize_x=head.quantize_x)
        if isinstance(head, QuantizedWeight):
            own = head.words, head.scale
            return product(x.astype(jnp.float32), *own, quantize_x=head.quantize_x)
        return product(x, head, transposed=True)

    def quantized(self, quantization: str | None) -> Llama:
        """This model with its products in `"int8"` or `"w8a8"`; None leaves it as it is.

        Weights become 8-bit numbers, in `"w8a8"` also what they are multiplied with.

        Adapters on top, norms, biases and an embedding that is not the output head stay as they
        are.

        Raises:
            ValueError: there is no such quantisation.
        """
        check_quantization(quantization)
        if quantization is None:
            return self
        return self._with_each(
            lambda name, value: quantize_parameter(name, value, self.config, quantization)
        )

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


def _products(batch: PagedBatch | None) -> dict[str, Any]:
    """How products are computed; what has no cache is to have a gradient."""
    if batch is None:
        return {"batch_invariant": False, "implementation": "xla"}
    return {"batch_invariant": batch.batch_invariant, "implementation": None}


def _linear(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight | PackedParameter,
    bias: nnx.Param[jax.Array] | None,
    *,
    batch_invariant: bool,
    implementation: str | None,
    contracted: int = 1,
) -> jax.Array:
    """`x: [T, in]` times a weight whose first `contracted` axes are `in`, as one 2-D product."""
    scale, own, quantize_x = None, weight, False
    if isinstance(weight, PackedParameter):
        out_shape, own, quantize_x = weight.out_shape, weight.weight, weight.quantize_x
    elif isinstance(weight, QuantizedWeight):
        out_shape, own, scale = weight.out_shape, weight.words, weight.scale
        quantize_x = weight.quantize_x
    else:
        out_shape, own = weight.shape[contracted:], weight.reshape(x.shape[1], -1)
    options = {"batch_invariant": batch_invariant, "implementation": implementation}
    y = linear(x, own, scale, quantize_x=quantize_x, **options)
    y = y.reshape(x.shape[0], *out_shape)
    return y if bias is None else y + bias[...]
