"""Kernels' tuning knobs: a heuristic gives them, measured values from JSON override it.

An entry of the JSON list is `{"kernel", "chip", "when", "knobs"}`: for that kernel on that chip,
where every shape field of `when` has the value given, the named knobs take these values. The
first entry that fits counts. `tuned.json` beside this file ships with octavo, and
`benchmarks/tune.py` makes such files on a device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from .chips import Chip

Knobs = TypeVar("Knobs")
_FIELDS = {"kernel", "chip", "when", "knobs"}
SHIPPED = Path(__file__).with_name("tuned.json")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured setting: see the module."""

    kernel: str
    chip: str
    when: tuple[tuple[str, int | str], ...]
    knobs: tuple[tuple[str, int | bool], ...]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Entries, the first that fits counts."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Read a JSON list of entries.

        Raises:
            ValueError: it is no such list.
        """
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise ValueError(f"expected a JSON list of entries, got a {type(rows).__name__}")
        return cls(tuple(_entry(row) for row in rows))

    def knobs_for(
        self, kernel: str, chip: Chip, shape: Mapping[str, int | str]
    ) -> dict[str, int | bool] | None:
        """The knobs of the first entry that fits, or None."""
        for entry in self.entries:
            if (entry.kernel, entry.chip) == (kernel, chip.name) and all(
                shape.get(name) == value for name, value in entry.when
            ):
                return dict(entry.knobs)
        return None


kernel_tuning = jax.make_user_context(default_value=Tuning())
"""`with kernel_tuning(Tuning.from_json(text)):` these entries come before the shipped ones."""


def tuned(kernel: str, chip: Chip, heuristic: Knobs, /, **shape: int | str) -> Knobs:
    """The heuristic's knobs, overridden by what was measured for this kernel, chip and shape.

    Args:
        kernel: "mosaic_gpu.decode" and the like.
        chip: what is traced for.
        heuristic: a frozen dataclass of knobs.
        shape: what an entry's `when` may ask for.

    Raises:
        ValueError: an entry names a knob that the kernel does not have.
    """
    found = kernel_tuning.value.knobs_for(kernel, chip, shape)
    if found is None:
        found = _shipped().knobs_for(kernel, chip, shape) or {}
    chosen = _override(kernel, heuristic, found)
    if (record := _record.get()) is not None:
        record[kernel] = chosen
    return chosen


def _override(kernel: str, heuristic: Knobs, found: Mapping[str, int | bool]) -> Knobs:
    known = {field.name for field in dataclasses.fields(heuristic)}  # type: ignore[arg-type]
    if unknown := sorted(set(found) - known):
        raise ValueError(f"{kernel} has no knobs {unknown}: it has {sorted(known)}")
    return dataclasses.replace(heuristic, **found)  # type: ignore[type-var]


_record: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "recorded knobs", default=None
)


@contextlib.contextmanager
def recorded_knobs() -> Iterator[dict[str, Any]]:
    """Collect the knobs, by kernel, of all that is traced inside."""
    record: dict[str, Any] = {}
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@functools.cache
def _shipped() -> Tuning:
    return Tuning.from_json(SHIPPED.read_text())


def _entry(row: Any) -> Entry:
    if not isinstance(row, dict) or set(row) != _FIELDS:
        raise ValueError(f"a tuning entry has the fields {sorted(_FIELDS)}, got {row!r}")
    for name, kinds in (("when", (int, str)), ("knobs", (int, bool))):
        values = row[name]
        if not isinstance(values, dict) or not all(isinstance(v, kinds) for v in values.values()):
            raise ValueError(f"{name}={values!r} must be an object of numbers or names")
    return Entry(
        str(row["kernel"]),
        str(row["chip"]),
        tuple(sorted(row["when"].items())),
        tuple(sorted(row["knobs"].items())),
    )
