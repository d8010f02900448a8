"""JSON objects, strictly read: no value is converted and no field is ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, LiteralString

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


def fail(
    message: str, *, param: str | None = None, code: LiteralString = "invalid_value"
) -> PydanticCustomError:
    """An error about the value being read or, with `param`, about that field of the object."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param})


def check_text(text: Any) -> str:
    """The text, if it is one that can be written as UTF-8."""
    if not isinstance(text, str):
        raise fail(f"expected a string, not {kind_of(text)}")
    if "\0" in text:
        raise fail("the text holds a NUL character; if it is meant, send token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise fail(f"the text holds half of a surrogate pair at {error.start}") from None
    return text


def kind_of(value: Any) -> str:
    """What JSON calls it, for messages."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


Text = Annotated[str, AfterValidator(check_text)]


class StrictBody(BaseModel):
    """A JSON object whose unsupported fields are dropped if neutral, and else refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        asking = {name: value for name, value in data.items() if not cls._is_neutral(name, value)}
        if unsupported := cls.neutral.keys() & asking.keys():
            name = min(unsupported)
            message = f"`{name}` is not supported by this server; leave it out"
            raise fail(message, param=name, code="unsupported_parameter")
        return asking

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        # Types are compared too: 0 and false are not the same request.
        values = cls.neutral.get(name, ())
        return any(type(value) is type(same) and value == same for same in values)
