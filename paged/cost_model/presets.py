"""Shapes of well-known models by name, and of any other from its `config.json`.

The widths are those of the `config.json` that each model was published with on Hugging Face.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .shape import ModelShape


def _dense(
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: tuple[int, int],
    head_size: int,
    vocab: int,
    tied: bool = False,
) -> ModelShape:
    return ModelShape.dense(
        num_layers=layers,
        width=width,
        mlp_width=mlp,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        vocab_size=vocab,
        tie_embeddings=tied,
    )


# Llama 3's and Mistral's vocabularies; Qwen 2.5's 7B and 72B are padded further than the smaller.
_LLAMA, _MISTRAL, _QWEN = 128_256, 32_768, 151_936

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3.2-1b": _dense(
            **{"layers": 16, "width": 2048, "mlp": 8192, "heads": (32, 8), "head_size": 64},
            **{"vocab": _LLAMA, "tied": True},
        ),
        "llama-3.2-3b": _dense(
            **{"layers": 28, "width": 3072, "mlp": 8192, "heads": (24, 8), "head_size": 128},
            **{"vocab": _LLAMA, "tied": True},
        ),
        "llama-3.1-8b": _dense(
            **{"layers": 32, "width": 4096, "mlp": 14336, "heads": (32, 8), "head_size": 128},
            vocab=_LLAMA,
        ),
        "llama-3.1-70b": _dense(
            **{"layers": 80, "width": 8192, "mlp": 28672, "heads": (64, 8), "head_size": 128},
            vocab=_LLAMA,
        ),
        "llama-3.1-405b": _dense(
            **{"layers": 126, "width": 16384, "mlp": 53248, "heads": (128, 8), "head_size": 128},
            vocab=_LLAMA,
        ),
        "smollm2-135m": _dense(
            **{"layers": 30, "width": 576, "mlp": 1536, "heads": (9, 3), "head_size": 64},
            **{"vocab": 49_152, "tied": True},
        ),
        "smollm2-360m": _dense(
            **{"layers": 32, "width": 960, "mlp": 2560, "heads": (15, 5), "head_size": 64},
            **{"vocab": 49_152, "tied": True},
        ),
        "smollm2-1.7b": _dense(
            **{"layers": 24, "width": 2048, "mlp": 8192, "heads": (32, 32), "head_size": 64},
            **{"vocab": 49_152, "tied": True},
        ),
        "mistral-7b-v0.3": _dense(
            **{"layers": 32, "width": 4096, "mlp": 14336, "heads": (32, 8), "head_size": 128},
            vocab=_MISTRAL,
        ),
        "qwen2.5-7b": _dense(
            **{"layers": 28, "width": 3584, "mlp": 18944, "heads": (28, 4), "head_size": 128},
            vocab=152_064,
        ),
        "qwen2.5-72b": _dense(
            **{"layers": 80, "width": 8192, "mlp": 29568, "heads": (64, 8), "head_size": 128},
            vocab=152_064,
        ),
        "qwen3-0.6b": _dense(
            **{"layers": 28, "width": 1024, "mlp": 3072, "heads": (16, 8), "head_size": 128},
            **{"vocab": _QWEN, "tied": True},
        ),
        "qwen3-8b": _dense(
            **{"layers": 36, "width": 4096, "mlp": 12288, "heads": (32, 8), "head_size": 128},
            vocab=_QWEN,
        ),
        "qwen3-32b": _dense(
            **{"layers": 64, "width": 5120, "mlp": 25600, "heads": (64, 8), "head_size": 128},
            vocab=_QWEN,
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
