"""Make the tiny models in hf/ and the logits in hf_reference.npz with Hugging Face transformers.

The project depends on neither torch nor transformers; this is run by hand when a model is added:

    python -m venv hf-venv
    hf-venv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    hf-venv/bin/python benchmarks/make_hf_reference.py

These are the versions that the committed files were made with. Seeds are fixed. The weights are
rounded to the dtype that they are stored in, and the logits are computed from those in float32.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parents[1] / "tests" / "models"
MODELS = HERE / "hf"
REFERENCE = HERE / "hf_reference.npz"
NUM_TOKENS = 40

# Sizes that are small and, where they can be, different from each other. With an epsilon of 1e-3
# (real models have 1e-5) a norm that misses it is seen in the logits.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Random weights of this scale make attention choosy and every part of a layer count.
SCALE = 0.3


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model: the prefix of its transformers classes and what differs from SIZES."""

    family: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    max_shard_size: str = "1GB"


RECIPES = {
    # Wavelengths of 6.3, 20, 63 and 199 positions: below 16/2 (kept), up to 16/0.5 (blended),
    # and above (divided by the factor).
    "llama-gqa": Recipe(
        family="Llama",
        dtype=torch.float32,
        config={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-tied-bias": Recipe(
        family="Llama",
        config={
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-linear": Recipe(
        family="Llama",
        config={"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}},
    ),
    # What a published config says, the betas left to their defaults. Heads of 16 and 1,024 trained
    # positions, because with fewer of either the default betas fall outside of the dimensions.
    "llama-yarn": Recipe(
        family="Llama",
        config={
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "llama-yarn-explicit": Recipe(
        family="Llama",
        config={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.25,
                "beta_fast": 2.0,
                "beta_slow": 0.25,
                "truncate": False,
            }
        },
    ),
    "mistral-window": Recipe(
        family="Mistral",
        config={
            "sliding_window": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen2": Recipe(
        family="Qwen2",
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "qwen3": Recipe(family="Qwen3", config={"head_dim": 16, "tie_word_embeddings": True}),
    "llama-sharded": Recipe(
        family="Llama", config={"num_key_value_heads": 4}, max_shard_size="16KB"
    ),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter, norms and biases too, which otherwise are ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = SCALE * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)


def make(name: str, recipe: Recipe, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write one model's folder; returns (ids `int32[T]`, logits `float32[T, V]`)."""
    config_class = getattr(transformers, f"{recipe.family}Config")
    model_class = getattr(transformers, f"{recipe.family}ForCausalLM")
    config = config_class(**(SIZES | recipe.config))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomise(model, seed)
    model.to(recipe.dtype).save_pretrained(
        MODELS / name, safe_serialization=True, max_shard_size=recipe.max_shard_size
    )
    (MODELS / name / "generation_config.json").unlink(missing_ok=True)

    # From the files, as anybody else would.
    model = model_class.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], NUM_TOKENS, np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    return ids, logits


def main() -> None:
    """Replace hf/ and hf_reference.npz."""
    shutil.rmtree(MODELS, ignore_errors=True)
    torch.set_num_threads(1)
    arrays = {}
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        ids, logits = make(name, recipe, seed)
        arrays |= {f"{name}/ids": ids, f"{name}/logits": logits}
        print(f"{name}: logits with a standard deviation of {logits.std():.2f}")
    np.savez_compressed(REFERENCE, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
