"""The sizes of a model that decide what its prefill and decoding cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Keys of architectures whose parameters, caches or attention are counted otherwise than here.
_UNSUPPORTED_KEYS = (
    *("num_local_experts", "num_experts", "n_routed_experts"),  # only some multiply each token
    "kv_lora_rank",  # latent attention: no keys and values per head
    "quantization_config",  # bytes of a parameter are not those of its dtype
    "sliding_window_pattern",  # windows in some layers
)
# Counts that may be 0: what a model can lack.
_MAY_BE_ZERO = ("num_head_params", "num_idle_params")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense transformer that decide what computing and keeping its tokens costs.

    Attributes:
        num_layers: L.
        num_heads: query heads N.
        num_kv_heads: KV heads K, a divisor of N.
        head_size: H.
        num_params: parameters that multiply every prompt token: the matrices of the layers.
        num_head_params: of the output head, which multiplies only tokens whose logits are needed:
            the last one of a prompt, and each one that is generated.
        num_idle_params: parameters that are held and multiply nothing: an embedding that is not
            the head as well. It is a look-up.
        sliding_window: positions a query sees, itself included; None means all.
        kv_dtype_bytes: bytes of an element of the KV cache.
        param_dtype_bytes: bytes of a parameter.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_params: int
    num_head_params: int = 0
    num_idle_params: int = 0
    sliding_window: int | None = None
    kv_dtype_bytes: int = 2
    param_dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sliding_window" and value is None:
                continue
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if type(value) is not int or value < least:
                kind = "a positive integer" if least else "an integer from 0 on"
                raise ValueError(f"{field.name}={value!r} must be {kind}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}: "
                "every KV head serves the same number of query heads"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters that a device must hold (norms and biases left out)."""
        num_params = self.num_params + self.num_head_params + self.num_idle_params
        return num_params * self.param_dtype_bytes

    def with_dtype(self, name: str) -> ModelShape:
        """The same model with parameters and cache in another dtype.

        Raises:
            ValueError: the dtype is not known.
        """
        num_bytes = _bytes_of(name)
        return replace(self, kv_dtype_bytes=num_bytes, param_dtype_bytes=num_bytes)

    def on_devices(self, num_devices: int) -> ModelShape:
        """What `num_devices` hold and read together, cut by heads.

        With more devices than KV heads, every one still needs a whole KV head: copies.

        Raises:
            ValueError: the heads cannot be cut so.
        """
        if type(num_devices) is not int or num_devices < 1:
            raise ValueError(f"{num_devices=} must be a positive integer")
        if num_devices not in self.device_counts():
            raise ValueError(
                f"{num_devices=} cannot share {self.num_heads} query heads and "
                f"{self.num_kv_heads} KV heads evenly: {', '.join(map(str, self.device_counts()))}"
            )
        return replace(self, num_kv_heads=max(self.num_kv_heads, num_devices))

    def device_counts(self) -> tuple[int, ...]:
        """On how many devices the heads can be cut evenly."""
        kv_heads = self.num_kv_heads
        return tuple(
            count
            for count in range(1, self.num_heads + 1)
            if self.num_heads % count == 0 and max(kv_heads, count) % min(kv_heads, count) == 0
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Count the parameters of a Llama-like model from the contents of its `config.json`.

        Raises:
            ValueError: a size is missing or no positive integer, or the architecture is counted
                otherwise (mixture of experts, latent attention, windows in some layers,
                quantised weights).
        """
        if strange := [key for key in _UNSUPPORTED_KEYS if config.get(key)]:
            raise ValueError(
                f"{', '.join(strange)} in config.json: only dense models with keys and values "
                "per head, all layers alike, are counted; make a ModelShape from its sizes instead"
            )

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if type(value) is not int or value < 1:
                raise ValueError(f"config.json has {key}={value!r}, expected a positive integer")
            return value

        width, heads = size("hidden_size"), size("num_attention_heads")
        return cls.dense(
            num_layers=size("num_hidden_layers"),
            width=width,
            mlp_width=size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_size=size("head_dim", max(width // heads, 1)),
            vocab_size=size("vocab_size"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=_window(config),
            dtype_bytes=_bytes_of(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
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
        vocab_size: int,
        tie_embeddings: bool = False,
        sliding_window: int | None = None,
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
            num_head_params=vocab_size * width,
            num_idle_params=0 if tie_embeddings else vocab_size * width,
            sliding_window=sliding_window,
            kv_dtype_bytes=dtype_bytes,
            param_dtype_bytes=dtype_bytes,
        )


def _bytes_of(dtype: Any) -> int:
    if not isinstance(dtype, str) or dtype not in BYTES_OF_DTYPE:
        raise ValueError(f"{dtype=} must be one of {', '.join(BYTES_OF_DTYPE)}")
    return BYTES_OF_DTYPE[dtype]


def _window(config: Mapping[str, Any]) -> int | None:
    window, layer_types = config.get("sliding_window"), config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json has {layer_types=}, expected a list")
    kinds = {str(kind) for kind in layer_types}
    if window is None or config.get("use_sliding_window") is False or kinds == {"full_attention"}:
        return None
    if len(kinds) > 1 or config.get("use_sliding_window"):
        raise ValueError(
            f"config.json has sliding_window={window!r} in some layers: only models whose layers "
            "are all alike are counted; make a ModelShape from its sizes instead"
        )
    return window
