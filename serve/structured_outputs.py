"""What form a text must have; named as vLLM names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .invalid_request import InvalidRequest

Kind = Literal["json", "regex", "choice", "grammar"]
_PARAM = "structured_outputs"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form that a text must have: exactly one of these.

    Attributes:
        json: a JSON schema, as text or as an object.
        json_object: any JSON object.
        regex: a regular expression for the whole text, in the syntax of Rust's `regex`.
        choice: one of these texts.
        grammar: a context-free grammar, in Lark's syntax or GBNF.

    Raises:
        InvalidRequest: none or several are given, or one is of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        def check(valid: bool, expected: str) -> None:
            if not valid:
                raise InvalidRequest(f"{_PARAM} must be {expected}", param=_PARAM)

        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        names = ", ".join(f.name for f in fields(self))
        check(len(given) == 1, f"one of {names}; got {', '.join(given) or 'none'}")
        check(self.json is None or isinstance(self.json, str | Mapping), "a schema in json")
        try:
            json.dumps(self.json)
        except (TypeError, ValueError):
            check(False, "a schema in json that JSON can write")
        check(isinstance(self.json_object, bool), "true or false in json_object")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            check(text is None or (isinstance(text, str) and text != ""), f"text in {name}")
        check(
            self.choice is None
            or (
                isinstance(self.choice, tuple)
                and len(self.choice) > 0
                and all(isinstance(text, str) and text for text in self.choice)
            ),
            "texts in choice, none of them empty",
        )

    @property
    def kind(self) -> Kind:
        """The field that is given; any JSON object is a schema too."""
        kinds: tuple[Kind, ...] = ("regex", "choice", "grammar")
        for kind in kinds:
            if getattr(self, kind) is not None:
                return kind
        return "json"

    @property
    def source(self) -> str:
        """Its value as text, the same for equal values."""
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)
