"""Makes a Hugging Face directory from a GGUF file, in float32, for engines that read no GGUF.

    python benchmarks/peer_model.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2-hf

It holds `config.json` and `model.safetensors`, and no tokenizer: `serving.py` sends token ids. The
same weights for llama.cpp: `llama-quantize --allow-requantize MODEL.Q4_1.gguf MODEL.F32.gguf F32`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.numpy import save_file

from octavo.models import load_model
from octavo.models.gguf_io import GgufSource


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()

    loaded = load_model(args.gguf)
    config = loaded.config
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context_len,
        "rms_norm_eps": config.rms_norm_eps,
        # Some readers look for the one, others for the other, and fall back silently to 10,000.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": sorted(loaded.eos_token_ids),
    }
    source = GgufSource(args.gguf)
    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: source.read(name) for name in source.shapes}
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    (args.folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
