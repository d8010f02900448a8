"""Low-rank adapters (LoRA, arXiv:2106.09685), several of them in one batch.

An adapter adds `x A B` to what a linear layer makes of `x`. The adapters that are loaded lie side
by side in Z slots, as arguments of the programs, so that loading one compiles nothing; every token
says by number which is its own, 0 for none. The factors stay apart, however the model fuses its
weights: projections that read one input share a product with their A's, and each has its own B.
What an adapter lacks, rank or projections, is zeros.

In a step of T tokens a projection costs `2 T u R (in + out)` FLOPs beside the model's own
`2 T in out`, where u counts the adapters in use on a CPU, and all Z slots elsewhere: there one wide
product takes less time than a loop whose length the host must wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..pallas_kernels.linear import by_rows
from .config import LlamaConfig

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections that read one input, by what the model calls their weights together."""


def lora_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each projection that an adapter may change."""
    width, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    return {
        "q_proj": (width, q),
        "k_proj": (width, kv),
        "v_proj": (width, kv),
        "o_proj": (q, width),
        "gate_proj": (width, mlp),
        "up_proj": (width, mlp),
        "down_proj": (mlp, width),
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoraFactors:
    """Factors of the J projections that read one input, for Z slots of rank R.

    Attributes:
        a: `[in, Z, J, R]`.
        b: J arrays `[Z, R, out]`, the scale of the adapter in them.
    """

    a: jax.Array
    b: tuple[jax.Array, ...]


LoraStack = tuple[dict[str, LoraFactors], ...]
"""Per layer, factors by the names of `FUSED`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenSlots:
    """Whose adapter each token of a step takes.

    Attributes:
        slot: `int32[T]`, from 1; 0 for none.
        used: `int32[Z]` places in the stack, those in use first.
        num_used: `int32[]`.
    """

    slot: jax.Array
    used: jax.Array
    num_used: jax.Array

    @classmethod
    def of(cls, slot: jax.Array, num_slots: int) -> TokenSlots:
        """From the slot of each token, `int32[T]`."""
        present = jnp.any(slot[:, None] == jnp.arange(1, num_slots + 1), axis=0)
        return cls(
            slot=slot,
            used=jnp.argsort(~present, stable=True).astype(jnp.int32),
            num_used=jnp.sum(present, dtype=jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoraBatch:
    """The adapters of one step: what is in the slots, and who takes which."""

    stack: LoraStack
    tokens: TokenSlots

    @classmethod
    def of(cls, stack: LoraStack, slot: jax.Array) -> LoraBatch:
        """From the slot of each token, `int32[T]`."""
        return cls(stack=stack, tokens=TokenSlots.of(slot, stack[0]["qkv"].a.shape[1]))


LayerLora = tuple[dict[str, LoraFactors], TokenSlots]


def add_lora(
    lora: LayerLora | None,
    name: str,
    x: jax.Array,
    outputs: tuple[jax.Array, ...],
    batch_invariant: bool = False,
) -> tuple[jax.Array, ...]:
    """Add to `outputs`, J arrays `[T, ...]` that the layer made of `x: [T, in]`, the adapters'."""
    if lora is None:
        return outputs
    layer, tokens = lora
    factors = layer[name]
    # One slot needs no loop (and without one the step has a gradient).
    looped = jax.default_backend() == "cpu" and factors.a.shape[1] > 1
    product = _in_a_loop if looped else _at_once
    deltas = product(x, factors, tokens, batch_invariant)
    return tuple(y + d.reshape(y.shape) for y, d in zip(outputs, deltas, strict=True))


def _at_once(
    x: jax.Array, factors: LoraFactors, tokens: TokenSlots, batch_invariant: bool = False
) -> tuple[jax.Array, ...]:
    """One product with the A's of all slots, of which each token keeps its own."""
    width, num_slots, num_parts, rank = factors.a.shape
    low = _times(x, factors.a.reshape(width, -1), batch_invariant)
    low = low.reshape(-1, num_slots, num_parts, rank)
    mine = tokens.slot[:, None] == jnp.arange(1, num_slots + 1)
    low = jnp.where(mine[:, :, None, None], low, jnp.zeros_like(low))
    return tuple(
        _times(
            low[:, :, j].reshape(x.shape[0], -1), b.reshape(num_slots * rank, -1), batch_invariant
        )
        for j, b in enumerate(factors.b)
    )


def _in_a_loop(
    x: jax.Array, factors: LoraFactors, tokens: TokenSlots, batch_invariant: bool = False
) -> tuple[jax.Array, ...]:
    """A product for each slot in use, of which its tokens keep theirs; nothing if there is none."""
    width, _, num_parts, rank = factors.a.shape

    def one(i: jax.Array, deltas: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = tokens.used[i]
        low = _times(x, factors.a[:, slot].reshape(width, -1), batch_invariant)
        low = jnp.where(tokens.slot[:, None] == slot + 1, low, jnp.zeros_like(low))
        low = low.reshape(-1, num_parts, rank)
        return tuple(
            d + _times(low[:, j], b[slot], batch_invariant)
            for j, (d, b) in enumerate(zip(deltas, factors.b, strict=True))
        )

    nothing = tuple(jnp.zeros((x.shape[0], b.shape[-1]), x.dtype) for b in factors.b)
    return jax.lax.fori_loop(0, tokens.num_used, one, nothing)


def _times(x: jax.Array, weight: jax.Array, batch_invariant: bool) -> jax.Array:
    return by_rows(lambda rows: rows @ weight, x, batch_invariant)


def init_lora(config: LlamaConfig, *, num_slots: int, rank: int, dtype: DTypeLike) -> LoraStack:
    """A stack of empty slots, all zeros."""
    shapes = lora_shapes(config)

    def factors(targets: tuple[str, ...]) -> LoraFactors:
        width = shapes[targets[0]][0]
        return LoraFactors(
            a=jnp.zeros((width, num_slots, len(targets), rank), dtype),
            b=tuple(jnp.zeros((num_slots, rank, shapes[t][1]), dtype) for t in targets),
        )

    return tuple(
        {name: factors(targets) for name, targets in FUSED.items()}
        for _ in range(config.num_layers)
    )


def place_lora(stack: LoraStack, adapter: LoraStack, slot: jax.Array) -> LoraStack:
    """Put `adapter`, a stack of one slot, into place `slot: int32[]` of the stack (from 0)."""

    def layer(factors: LoraFactors, new: LoraFactors) -> LoraFactors:
        a = jax.lax.dynamic_update_slice_in_dim(factors.a, new.a, slot, axis=1)
        b = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, one, slot, axis=0)
            for old, one in zip(factors.b, new.b, strict=True)
        )
        return LoraFactors(a=a, b=b)

    return tuple(
        {name: layer(old[name], new[name]) for name in FUSED}
        for old, new in zip(stack, adapter, strict=True)
    )
