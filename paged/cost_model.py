"""What a prefill costs: FLOPs, bytes and seconds from the sizes of a model and of a machine.

All of it is host arithmetic on Python numbers or NumPy arrays (`float64` where sums may pass
`2**63`). Positions count tokens of one sequence: the cost from `start` to `stop` is that of the
tokens `start <= i < stop` when the ones before them are cached.

    >>> shape = model_shape("llama-3.1-70b")
    >>> kv_bytes(shape, 1)
    327680
    >>> whole = prefill_flops(shape, 0, 131_072)
    >>> round(prefill_flops(shape, 130_048, 131_072) / whole, 3)  # the last 1,024 tokens of it
    0.012
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

Count = TypeVar("Count", int, float, np.ndarray)

_BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Keys of architectures whose parameters or caches are counted otherwise than here.
_UNSUPPORTED_KEYS = (
    *("num_local_experts", "num_experts", "n_routed_experts"),  # only some multiply each token
    "kv_lora_rank",  # latent attention: no keys and values per head
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense transformer that decide what a prefill costs.

    Attributes:
        num_layers: L.
        num_heads: query heads N.
        num_kv_heads: KV heads K, a divisor of N.
        head_size: H.
        num_params: parameters that multiply every prompt token: the matrices of the layers. The
            embedding is a look-up, and the output head sees only the last token of a prompt.
        kv_dtype_bytes: bytes of an element of the KV cache.
        param_dtype_bytes: bytes of a parameter.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_params: int
    kv_dtype_bytes: int = 2
    param_dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: "
                "every KV head serves the same number of query heads"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Count the parameters of a Llama-like model from the contents of its `config.json`.

        Raises:
            ValueError: a size is missing or no positive integer, or the architecture is counted
                otherwise (mixture of experts, latent attention).
        """
        if strange := [key for key in _UNSUPPORTED_KEYS if config.get(key)]:
            raise ValueError(
                f"{', '.join(strange)} in config.json: only dense models with keys and values "
                "per head are counted; make a ModelShape from its sizes instead"
            )

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if type(value) is not int or value < 1:
                raise ValueError(f"config.json has {key}={value!r}, expected a positive integer")
            return value

        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if dtype not in _BYTES_OF_DTYPE:
            raise ValueError(f"{dtype=} in config.json must be one of {', '.join(_BYTES_OF_DTYPE)}")
        width, heads = size("hidden_size"), size("num_attention_heads")
        return cls.dense(
            num_layers=size("num_hidden_layers"),
            width=width,
            mlp_width=size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_size=size("head_dim", width // heads),
            dtype_bytes=_BYTES_OF_DTYPE[dtype],
        )

    @classmethod
    def dense(
        cls,
        *,
        num_layers: int,
        width: int,
        mlp_width: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype_bytes: int = 2,
    ) -> ModelShape:
        """A shape with the parameters of gated MLPs and attention counted from the widths."""
        attention = 2 * width * (num_heads + num_kv_heads) * head_size  # q and out, k and v
        gated_mlp = 3 * width * mlp_width
        return cls(
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            num_params=num_layers * (attention + gated_mlp),
            kv_dtype_bytes=dtype_bytes,
            param_dtype_bytes=dtype_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a machine sustains (not what its data sheet promises at best).

    Attributes:
        flops_per_second: of matrix products in the model's dtype.
        link_bytes_per_second: from host memory to the accelerator.
        memory_bytes_per_second: of the accelerator's own memory.
    """

    flops_per_second: float
    link_bytes_per_second: float
    memory_bytes_per_second: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name}={value!r} must be a positive number")


MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape.dense(
            **{"num_layers": 32, "width": 4096, "mlp_width": 14336},
            **{"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
        ),
        "llama-3.1-70b": ModelShape.dense(
            **{"num_layers": 80, "width": 8192, "mlp_width": 28672},
            **{"num_heads": 64, "num_kv_heads": 8, "head_size": 128},
        ),
        "smollm2-135m": ModelShape.dense(
            **{"num_layers": 30, "width": 576, "mlp_width": 1536},
            **{"num_heads": 9, "num_kv_heads": 3, "head_size": 64},
        ),
    }
)

# About 45 % of the dense bfloat16 peak, 85 % of the link's and all of the memory's.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(
            flops_per_second=140e12, link_bytes_per_second=27e9, memory_bytes_per_second=2.04e12
        ),
        "h100": Hardware(
            flops_per_second=450e12, link_bytes_per_second=55e9, memory_bytes_per_second=3.35e12
        ),
        "h200": Hardware(
            flops_per_second=450e12, link_bytes_per_second=55e9, memory_bytes_per_second=4.8e12
        ),
    }
)


def model_shape(name: str) -> ModelShape:
    """The shape called `name` in `MODEL_SHAPES`, or that of a `config.json` at that path.

    Args:
        name: a known name, a Hugging Face `config.json`, or the directory it is in.

    Raises:
        ValueError: it is neither, or the file does not describe a dense model.
    """
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{name!r} is no known model shape ({', '.join(MODEL_SHAPES)}) and no config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"found {type(config).__name__} in config.json, expected an object")
        return ModelShape.from_hf(config)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read a model's shape from {path}: {error}") from error


def prefill_flops(shape: ModelShape, start: Count, stop: Count) -> Count:
    """FLOPs to compute the tokens from `start` to `stop` of a sequence.

    Linear layers cost 2 per parameter and token. Attention costs `4 N H` per layer for every
    query and key; the query at position i sees `i + 1/2` keys, the diagonal counting half. So t
    tokens that end at length L cost `4 num_layers N H t (L - t/2)`. Query heads do the work: N,
    not K.
    """
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_size
    return 2 * shape.num_params * (stop - start) + attention * (stop * stop - start * start)


def cost_slope(shape: ModelShape, block_size: int) -> float:
    """What a block of context adds to the FLOPs of computing a block, in a first block's FLOPs."""
    first = prefill_flops(shape, 0, block_size)
    return (prefill_flops(shape, block_size, 2 * block_size) - first) / first


def kv_bytes(shape: ModelShape, num_tokens: Count) -> Count:
    """Bytes of the keys and values of `num_tokens` tokens in all layers."""
    per_head = 2 * shape.head_size * shape.kv_dtype_bytes
    return shape.num_layers * shape.num_kv_heads * per_head * num_tokens


def prefill_seconds(shape: ModelShape, hardware: Hardware, start: Count, stop: Count) -> Any:
    """Seconds to compute the tokens from `start` to `stop`, one sequence alone.

    The longer of computing and of reading each parameter once and the keys and values up to
    `stop`: the latter is what a hit that leaves few tokens comes down to. A float, or an array
    where the positions are arrays.
    """
    compute = prefill_flops(shape, start, stop) / hardware.flops_per_second
    num_bytes = shape.num_params * shape.param_dtype_bytes + kv_bytes(shape, stop)
    return np.maximum(compute, num_bytes / hardware.memory_bytes_per_second)


def restore_seconds(shape: ModelShape, hardware: Hardware, num_tokens: Count) -> Any:
    """Seconds to bring the keys and values of `num_tokens` tokens back from host memory."""
    return kv_bytes(shape, num_tokens) / hardware.link_bytes_per_second
