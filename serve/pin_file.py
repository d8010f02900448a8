"""Prefixes that are computed and pinned before a server takes requests: `--pin-file`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ..models import ChatTemplateError, LoadedModel
from ..paged import PinBudgetExceeded
from .cache_api import PinRequest
from .chat_ids import chat_ids
from .console import RUN_ERROR, USAGE_ERROR, ProgressFn, give_up
from .engine import Engine
from .sampling_params import InvalidRequest, SamplingParams


def read_pins(path: Path) -> list[tuple[int, PinRequest]]:
    """Each line of a file that is not empty, with its number; the form is that of `/cache/pin`.

    Ends the command with an error if the file cannot be read or a line is not understood.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        give_up(f"--pin-file {path}: {error}", USAGE_ERROR)
    pins = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pins.append((number, PinRequest.model_validate_json(line)))
            except ValidationError as error:
                told = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
                what = "; ".join(f"{where}: {why}" if where else why for where, why in told)
                give_up(f"--pin-file {path}, line {number}: {what}", USAGE_ERROR)
    return pins


def compute_and_pin(
    engine: Engine, path: Path, pins: Sequence[tuple[int, PinRequest]], progress: ProgressFn
) -> None:
    """Compute what is cached nowhere, and pin it; ends the command with an error if one fails."""
    for done, (number, pin) in enumerate(pins):
        progress(done, len(pins), "pinning")
        whose = {"cache_salt": pin.cache_salt or "", "adapter": pin.adapter}
        try:
            prompt = _prompt(engine.loaded, pin)
            params = SamplingParams(temperature=0, max_tokens=1)
            engine.collect([engine.add_request(prompt, params, **whose)])
            engine.pin(prompt, ttl_seconds=pin.ttl_seconds, **whose)
        except (InvalidRequest, ChatTemplateError, PinBudgetExceeded) as error:
            give_up(f"--pin-file {path}, line {number}: {error}", RUN_ERROR)
    progress(len(pins), len(pins), "pinning")


def _prompt(loaded: LoadedModel, pin: PinRequest) -> str | list[int]:
    if pin.prompt is not None:
        return pin.prompt[0]
    return chat_ids(loaded, [message.for_template() for message in pin.messages or ()])
