"""Make the adapters in tests/models/lora/ and the logits in lora_reference.npz with PEFT.

The project does not depend on torch, transformers or PEFT; this is run by hand, after
make_hf_reference.py, whose models the adapters are for:

    hf-venv/bin/pip install peft==0.21.2
    hf-venv/bin/python benchmarks/make_lora_reference.py
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

HERE = Path(__file__).resolve().parents[1] / "tests" / "models"
ADAPTERS = HERE / "lora"
REFERENCE = HERE / "lora_reference.npz"
NUM_TOKENS = 40
SCALE = 0.1  # of the factors: the adapters change the logits by about as much as they are


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One adapter: its base model and what its config says."""

    base: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPES = {
    "all-rslora": Recipe(
        base="llama-gqa",
        config={"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL},
    ),
    "patterns": Recipe(
        base="llama-gqa",
        dtype=torch.bfloat16,
        config={
            "r": 2,
            "lora_alpha": 5,
            "target_modules": ["q_proj", "v_proj", "mlp.up_proj"],
            "rank_pattern": {r"layers\.1\..*q_proj": 6, "v_proj": 3},
            "alpha_pattern": {"model.layers.0.self_attn.v_proj": 9, "up_proj": 1.5},
        },
    ),
    "one-layer": Recipe(
        base="qwen2",
        config={
            "r": 5,
            "lora_alpha": 10,
            "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"],
            "layers_to_transform": [1],
        },
    ),
    "regex": Recipe(
        base="llama-tied-bias",
        config={"r": 3, "lora_alpha": 3, "target_modules": r".*\.0\.(self_attn|mlp)\.[vod].*_proj"},
    ),
}


def make(name: str, recipe: Recipe, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write one adapter's folder; returns (ids `int32[T]`, logits `float32[T, V]`)."""
    base = HERE / "hf" / recipe.base

    def load_base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )

    settings = peft.LoraConfig(task_type="CAUSAL_LM", **recipe.config)
    model = peft.get_peft_model(load_base(), settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if "lora_" in parameter_name:
                parameter.copy_(SCALE * torch.randn(parameter.shape, generator=generator))
                parameter.data = parameter.data.to(recipe.dtype)
    model.peft_config["default"].base_model_name_or_path = recipe.base
    model.save_pretrained(ADAPTERS / name, safe_serialization=True, save_embedding_layers=False)
    (ADAPTERS / name / "README.md").unlink(missing_ok=True)

    # From the files, as anybody else would.
    model = peft.PeftModel.from_pretrained(load_base(), ADAPTERS / name).eval()
    ids = np.random.default_rng(seed).integers(0, 64, NUM_TOKENS, np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
        with model.disable_adapter():
            plain = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    changed = np.abs(logits - plain).std() / plain.std()
    print(f"{name}: the logits change by {changed:.2f} of their standard deviation")
    return ids, logits


def main() -> None:
    """Replace lora/ and lora_reference.npz."""
    shutil.rmtree(ADAPTERS, ignore_errors=True)
    torch.set_num_threads(1)
    arrays = {}
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        ids, logits = make(name, recipe, seed)
        arrays |= {f"{name}/ids": ids, f"{name}/logits": logits}
    np.savez_compressed(REFERENCE, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
