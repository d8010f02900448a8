"""What users may do to an engine's adapters: load, reload, unload, list."""

from __future__ import annotations

from pathlib import Path

from ..models import LoadedModel, LoraAdapter
from ..models import load_adapter as read_adapter
from .beams import BeamSearches
from .request import Request
from .runner import ModelRunner


class AdapterControl:
    """An engine's adapters as its users see them."""

    loaded: LoadedModel
    _runner: ModelRunner
    _requests: dict[str, Request]
    _beams: BeamSearches

    def load_adapter(self, name: str, adapter: str | Path | LoraAdapter) -> str:
        """Load a LoRA adapter, or load it again; returns its version, a digest of its weights.

        Requests that have begun with another version end with it. What has been cached is found
        again if and only if the weights are equal.

        Args:
            name: what requests call it.
            adapter: a directory as PEFT writes it, or what `octavo.models.load_adapter` returned.

        Raises:
            WeightsError: the files are broken, not supported, or of another model.
            ValueError: the adapter's rank is more than `max_lora_rank`.
            NoAdapterSlot: `max_loras` others are loaded or in use. Nothing has changed in any case.
        """
        if not isinstance(adapter, LoraAdapter):
            adapter = read_adapter(adapter, self.loaded.config)
        using = [*self._requests.values(), *self._beams.prompts]
        in_use = [request.adapter for request in using if request.adapter is not None]
        return self._runner.adapters.load(name, adapter, in_use).version

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that have begun go on with it.

        Raises:
            InvalidRequest: it is not loaded.
        """
        self._runner.adapters.unload(name)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that requests may name."""
        return tuple(adapter.name for adapter in self._runner.adapters.loaded)
