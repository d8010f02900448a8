"""What requests to load and unload adapters may contain: vLLM's fields, strictly read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from .protocol import StrictBody, Text


class LoadAdapterRequest(StrictBody):
    """Body of POST /v1/load_lora_adapter."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "base_model_name": (None,),
        "is_3d_lora_weight": (None, False),
    }

    lora_name: Text
    lora_path: Text = Field(description="A folder, relative to the server's --lora-dir.")
    load_inplace: bool | None = Field(default=None, description="Replace one of the same name.")


class UnloadAdapterRequest(StrictBody):
    """Body of POST /v1/unload_lora_adapter."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"lora_int_id": (None,)}

    lora_name: Text
