"""The shape of a Llama-family model, read from Hugging Face or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_HF_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
}
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context a model was trained on.

    `kind` names the scheme; a field that the scheme does not use is ignored by it.
    `factors` holds one divisor per frequency (`[H/2]`), as GGUF files of Llama 3 carry them.
    """

    kind: Literal["llama3", "linear", "yarn", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of a Llama-family model (Llama 2/3, Mistral, Qwen 2/3).

    Lengths are in tokens. `sliding_window` is the number of positions a query sees,
    itself included; None means all of them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_context_len: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_context_len",
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even for rotary embeddings")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be positive")

    @property
    def num_groups(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the contents of a Hugging Face `config.json`.

        Raises:
            ValueError: the architecture, activation or RoPE scheme is not supported, or a
                required key is missing.
        """
        architectures = config.get("architectures") or []
        arch = next((a for a in architectures if a in _HF_ARCHITECTURES), None)
        if arch is None:
            raise ValueError(
                f"architectures={architectures} is not supported; expected one of "
                f"{', '.join(_HF_ARCHITECTURES)}"
            )
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise ValueError(f"hidden_act={act!r} is not supported; expected 'silu'")
        missing = [
            k
            for k in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            )
            if k not in config
        ]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window=true (windows in some layers) is not supported")
        # A key that a file leaves out means the default of its own architecture.
        defaults = _HF_DEFAULTS.get(arch, {})
        heads = config["num_attention_heads"]
        has_bias_keys = arch in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        bias = has_bias_keys and bool(config.get("attention_bias", False))
        max_len = config.get(
            "max_position_embeddings", defaults.get("max_position_embeddings", 2048)
        )
        theta, scaling = _rope_from_hf(config, max_len)
        kv_heads = config.get("num_key_value_heads", defaults.get("num_key_value_heads"))
        head_size = config.get("head_dim", defaults.get("head_dim"))
        window = config.get("sliding_window", defaults.get("sliding_window"))
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads or heads,
            head_size=head_size or config["hidden_size"] // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_context_len=max_len,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias or arch == "Qwen2ForCausalLM",
            attention_out_bias=bias,
            mlp_bias=arch == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=arch == "Qwen3ForCausalLM",
            sliding_window=window if arch == "MistralForCausalLM" else None,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: Collection[str]) -> LlamaConfig:
        """Read GGUF key-value metadata; what it leaves out is told by the tensors' names.

        Raises:
            ValueError: the architecture or RoPE scheme is not supported, or a key is missing.
        """
        arch = metadata.get("general.architecture")
        if arch not in _GGUF_ARCHITECTURES:
            raise ValueError(
                f"general.architecture={arch!r} is not supported; expected one of "
                f"{', '.join(_GGUF_ARCHITECTURES)}"
            )

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise ValueError(f"the GGUF metadata lacks {arch}.{key}")
            return value

        heads = int(get("attention.head_count"))
        hidden = int(get("embedding_length"))
        head_size = int(get("attention.key_length", hidden // heads))
        rotary = int(get("rope.dimension_count", head_size))
        if rotary != head_size:
            raise ValueError(
                f"{arch}.rope.dimension_count={rotary} must equal the head size {head_size}"
            )
        max_len = int(get("context_length"))
        vocab = metadata.get(f"{arch}.vocab_size") or len(
            metadata.get("tokenizer.ggml.tokens") or ()
        )
        return cls(
            vocab_size=int(vocab),
            hidden_size=hidden,
            intermediate_size=int(get("feed_forward_length")),
            num_layers=int(get("block_count")),
            num_heads=heads,
            num_kv_heads=int(get("attention.head_count_kv", heads)),
            head_size=head_size,
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(get("rope.freq_base", 10_000.0)),
            rope_scaling=_rope_from_gguf(metadata, arch, max_len),
            max_context_len=max_len,
            tie_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            attention_out_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        )


def _rope_from_hf(config: Mapping[str, Any], max_len: int) -> tuple[float, RopeScaling | None]:
    # `rope_parameters` (newer files) carries theta beside the scheme; older files keep
    # `rope_theta` at the top. Looking in one place only falls back to 10,000 silently.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"RoPE settings by layer type are not supported: {sorted(rope)}")

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key}={value!r} in the RoPE settings must be a number")
        return float(value)

    theta = number("rope_theta", config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "linear", "yarn"):
        raise ValueError(f"rope type {kind!r} is not supported; expected llama3, linear or yarn")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    original = (
        config.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or max_len
    )
    factor = number("factor", max_len / original if kind == "yarn" else None)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        ratio = [0.1 * number(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")]
        attention_factor = ratio[0] / ratio[1] if factor > 1 else 1.0
    return theta, RopeScaling(
        kind=kind,
        factor=factor,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        original_context_len=int(original),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=bool(rope.get("truncate", True)),
    )


def _rope_from_gguf(metadata: Mapping[str, Any], arch: str, max_len: int) -> RopeScaling | None:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{arch}.rope.scaling.type={kind!r} is not supported; expected linear or yarn"
        )
    return RopeScaling(
        kind=kind,
        factor=float(metadata[f"{arch}.rope.scaling.factor"]),
        original_context_len=int(
            metadata.get(f"{arch}.rope.scaling.original_context_length", max_len)
        ),
        attention_factor=metadata.get(f"{arch}.rope.scaling.attn_factor"),
    )
