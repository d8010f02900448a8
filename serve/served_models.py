"""What clients may name as `model`: the model itself, and each adapter that is loaded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from ..models import LoraAdapter, load_adapter
from .adapter_protocol import LoadAdapterRequest, UnloadAdapterRequest
from .adapters import NoAdapterSlot
from .async_engine import AsyncEngine
from .engine import Engine
from .errors import ApiError
from .sampling_params import InvalidRequest


class ServedModels:
    """The names of a server, and the two endpoints that change them, in vLLM's form.

    Args:
        async_engine: the engine.
        name: what clients call the model itself.
        adapter_dir: where adapters must lie that clients load; they can load none without it.
    """

    def __init__(self, async_engine: AsyncEngine, name: str, adapter_dir: Path | None):
        self.name = name
        self._engine = async_engine
        self._adapter_dir = adapter_dir
        self._created = int(time.time())

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a client means by `model`, None for the model itself.

        Raises:
            ApiError: 404, there is none of that name.
        """
        if model == self.name:
            return None
        names = self._engine.adapter_names
        if model not in names:
            known = ", ".join(map(repr, (self.name, *names)))
            message = f"there is no model {model!r:.100}; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def list(self) -> dict[str, Any]:
        """List the model and the adapters."""
        names = (self.name, *self._engine.adapter_names)
        return {"object": "list", "data": [self._card(name) for name in names]}

    async def describe(self, model_id: str) -> dict[str, Any]:
        """Describe the model or an adapter."""
        self.adapter_of(model_id)
        return self._card(model_id)

    async def load(self, body: LoadAdapterRequest) -> dict[str, Any]:
        """Load an adapter from the server's folder of adapters."""
        if body.lora_name == self.name:
            raise _refused(f"{self.name!r} is the model itself", "lora_name")
        path = self._inside(body.lora_path)

        def place(engine: Engine, weights: LoraAdapter) -> ApiError | None:
            if not body.load_inplace and body.lora_name in engine.adapter_names:
                message = f"{body.lora_name!r} is loaded; with `load_inplace` it is replaced"
                return _refused(message, "lora_name")
            try:
                engine.load_adapter(body.lora_name, weights)
            except (ValueError, NoAdapterSlot) as error:
                return _refused(str(error), "lora_path")
            return None

        try:
            # Neither the event loop nor the engine waits for the files.
            weights = await asyncio.to_thread(load_adapter, path, self._engine.loaded.config)
        except (ValueError, OSError) as error:
            raise _refused(str(error), "lora_path") from None
        if (refusal := await self._engine.run(lambda engine: place(engine, weights))) is not None:
            raise refusal
        return self._card(body.lora_name)

    async def unload(self, body: UnloadAdapterRequest) -> dict[str, Any]:
        """Take no more requests for an adapter; those that have begun go on with it."""
        if self.adapter_of(body.lora_name) is None:
            raise _refused(f"{self.name!r} is the model itself", "lora_name")
        try:
            await self._engine.run(lambda engine: engine.unload_adapter(body.lora_name))
        except InvalidRequest as error:  # somebody else has, meanwhile
            raise _refused(str(error), "lora_name") from None
        return {"id": body.lora_name, "object": "model", "deleted": True}

    def _inside(self, path: str) -> Path:
        assert self._adapter_dir is not None, "the endpoint is there only with a folder"
        root = self._adapter_dir.resolve()
        # Links are followed first: one that leads out of the folder is refused.
        resolved = (root / path).resolve()
        if not resolved.is_relative_to(root):
            raise _refused(f"{path!r:.100} is not inside the server's --lora-dir", "lora_path")
        return resolved

    def _card(self, name: str) -> dict[str, Any]:
        card = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": self._engine.max_model_len,
        }
        return card if name == self.name else card | {"parent": self.name}


def _refused(message: str, param: str) -> ApiError:
    return ApiError(400, f"`{param}`: {message}", param=param, code="invalid_value")
