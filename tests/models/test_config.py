"""What `LlamaConfig` reads from files, where two readings are possible."""

from __future__ import annotations

import math

import pytest

from octavo.models import LlamaConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def read(**keys) -> LlamaConfig:
    return LlamaConfig.from_hf({**BASE, **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_theta_is_found_wherever_a_file_keeps_it(keys: dict) -> None:
    assert read(**keys).rope_theta == 5e5
    assert read().rope_theta == 10_000


def test_yarn_takes_its_magnitude_from_mscale() -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}
    scaling = read(rope_scaling=yarn).rope_scaling
    assert scaling is not None and scaling.attention_factor is not None
    want = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert scaling.attention_factor == pytest.approx(want)


def test_yarn_without_a_factor_stretches_to_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    scaling = read(max_position_embeddings=4096, rope_scaling=yarn).rope_scaling
    assert scaling is not None and scaling.factor == 4


def test_the_original_length_at_the_top_wins() -> None:
    rope = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 1}
    scaling = read(rope_scaling=rope, original_max_position_embeddings=2048).rope_scaling
    assert scaling is not None and scaling.original_context_len == 2048


def test_a_key_left_out_means_the_architectures_own_default() -> None:
    mistral = read(architectures=["MistralForCausalLM"], num_attention_heads=8)
    assert (mistral.sliding_window, mistral.num_kv_heads) == (4096, 8)
    full = read(architectures=["MistralForCausalLM"], num_attention_heads=8, sliding_window=None)
    assert full.sliding_window is None
    qwen = read(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen.head_size, qwen.num_kv_heads, qwen.qk_norm) == (128, 2, True)
    assert read(num_key_value_heads=None).num_kv_heads == 4


def test_bias_keys_count_only_where_the_architecture_has_them() -> None:
    keys = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}
    got = {
        name: read(architectures=[f"{name}ForCausalLM"], **keys)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    }
    biases = {n: (c.attention_bias, c.attention_out_bias, c.mlp_bias) for n, c in got.items()}
    assert biases == {
        "Llama": (True, True, True),
        "Mistral": (False, False, False),
        "Qwen2": (True, False, False),
        "Qwen3": (True, True, False),
    }


REFUSED = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "no architecture": ({"architectures": None}, "architectures"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "missing": ({"vocab_size": 0}, "vocab_size=0"),
    "heads": ({"num_key_value_heads": 3}, "num_kv_heads=3"),
    "odd head": ({"head_dim": 7}, "head_size=7"),
    "scheme": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
    "text factor": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    "by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "full_attention"),
    "partial": (
        {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "theta": ({"rope_theta": -1.0}, "rope_theta=-1.0"),
    "windows": ({"use_sliding_window": True}, "use_sliding_window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read(**keys)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_size, intermediate_size"):
        LlamaConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"],
                **{k: v for k, v in BASE.items() if k not in ("hidden_size", "intermediate_size")},
            }
        )
