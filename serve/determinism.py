"""Whether an engine keeps every bit of a logit the same, where nobody said."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..models import LoadedModel
from ..pallas_kernels import cpu_kernels
from .config import EngineConfig


def with_determinism(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """`config` with `deterministic` decided, if it was None.

    Raises:
        ValueError: it is True where no kernel keeps its promise.
    """
    on_cpu = jax.default_backend() == "cpu"
    if config.deterministic and not on_cpu:
        raise ValueError(
            f"deterministic=True needs the CPU backend, not {jax.default_backend()}: elsewhere "
            "kernels sum up in an order that depends on the batch"
        )
    if config.deterministic is not None:
        return config
    return replace(config, deterministic=on_cpu and _costs_less_than_it_is_worth(config, loaded))


def _costs_less_than_it_is_worth(config: EngineConfig, loaded: LoadedModel) -> bool:
    # Rounding makes whole steps of last bits: tokens would depend on what was found.
    if loaded.quantization == "w8a8":
        return True
    # The kernels for CPUs sum up in one order anyway.
    return loaded.model.dtype == jnp.float32 and cpu_kernels() is not None
