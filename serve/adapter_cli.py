"""Adapters that the command line names: `--lora-modules NAME=PATH`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .console import RUN_ERROR, USAGE_ERROR, give_up
from .engine import Engine


def parse_modules(modules: Sequence[str]) -> dict[str, str]:
    """Paths by name; ends the command with an error if one is not understood."""
    adapters: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path or name in adapters:
            give_up(f"--lora-modules {module}: expected NAME=PATH, each name once", USAGE_ERROR)
        adapters[name] = path
    return adapters


def load_modules(engine: Engine, adapters: Mapping[str, str], model_name: str) -> None:
    """Load adapters by name and path; ends the command with an error if one does not load."""
    for name, path in adapters.items():
        if name == model_name:
            give_up(f"--lora-modules {name}={path}: that is the model's own name", USAGE_ERROR)
        try:
            engine.load_adapter(name, path)
        except (OSError, ValueError) as error:
            give_up(f"cannot load the adapter {name!r}: {error}", RUN_ERROR)
