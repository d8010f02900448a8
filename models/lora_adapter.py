"""One low-rank adapter on the host: its factors by projection, into a stack and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .config import LlamaConfig
from .lora import FUSED, LoraFactors, LoraStack, lora_shapes
from .weights import WeightsError

Pair = tuple[np.ndarray, np.ndarray]
"""`A float32[in, r]` and `B float32[r, out]`, the scale in B."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraAdapter:
    """One adapter on the host.

    Attributes:
        config: of the model that it belongs to.
        layers: per layer, the factors of each projection that it changes.
    """

    config: LlamaConfig
    layers: Sequence[dict[str, Pair]]

    @classmethod
    def fresh(
        cls, config: LlamaConfig, *, rank: int, targets: Sequence[str], seed: int = 0
    ) -> LoraAdapter:
        """An adapter to be trained: A at random and B zero, so that it changes nothing."""
        rng, shapes = np.random.default_rng(seed), lora_shapes(config)

        def pair(width: int, out: int) -> Pair:
            a = rng.standard_normal((width, rank), np.float32) / np.float32(np.sqrt(width))
            return a, np.zeros((rank, out), np.float32)

        layers = [{t: pair(*shapes[t]) for t in targets} for _ in range(config.num_layers)]
        return cls(config=config, layers=layers)

    @property
    def rank(self) -> int:
        """The largest rank of its factors."""
        return max((a.shape[1] for layer in self.layers for a, _ in layer.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of all factors: equal for adapters that do the same."""
        digest = hashlib.sha256()
        for i, layer in enumerate(self.layers):
            for target, pair in sorted(layer.items()):
                digest.update(repr((i, target, [array.shape for array in pair])).encode())
                for array in pair:
                    digest.update(np.ascontiguousarray(array, np.float32).data)
        return digest.hexdigest()

    def stack(self, *, rank: int, dtype: DTypeLike) -> LoraStack:
        """The adapter as a stack of one slot of `rank`, at least its own, in host memory.

        Raises:
            WeightsError: a value is not finite in `dtype`. In a batch it would reach tokens that
                do not take this adapter.
        """
        shapes, dtype = lora_shapes(self.config), np.dtype(jnp.dtype(dtype))
        stack = []
        for index, pairs in enumerate(self.layers):
            layer = {}
            for name, targets in FUSED.items():
                a = np.zeros((shapes[targets[0]][0], 1, len(targets), rank), dtype)
                b = tuple(np.zeros((1, rank, shapes[t][1]), dtype) for t in targets)
                for j, target in enumerate(targets):
                    if target in pairs:
                        own = pairs[target][0].shape[1]
                        with np.errstate(over="ignore"):  # looked for below
                            a[:, 0, j, :own], b[j][0, :own] = pairs[target]
                    for array in (a[:, 0, j], b[j]):
                        if not np.isfinite(array.astype(np.float32)).all():
                            raise WeightsError(
                                f"the factors of {target} in layer {index} hold values that are "
                                f"not finite in {dtype}"
                            )
                layer[name] = LoraFactors(a=a, b=b)  # pyright: ignore[reportArgumentType]
            stack.append(layer)
        return tuple(stack)

    @classmethod
    def from_stack(cls, config: LlamaConfig, stack: LoraStack, slot: int = 0) -> LoraAdapter:
        """What is in a slot of a stack, of a training run for instance."""
        layers = []
        for layer in jax.device_get(stack):
            pairs = {}
            for name, targets in FUSED.items():
                factors = layer[name]
                for j, target in enumerate(targets):
                    a, b = factors.a[:, slot, j], factors.b[j][slot]
                    if a.any() or b.any():
                        pairs[target] = a.astype(np.float32), b.astype(np.float32)
            layers.append(pairs)
        return cls(config=config, layers=tuple(layers))
