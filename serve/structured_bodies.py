"""The fields by which a body asks for a form of the text: OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from .strict_body import StrictBody, Text, fail
from .structured_outputs import StructuredOutputs

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class JsonSchemaFormat(StrictBody):
    """OpenAI's `response_format.json_schema`; schemas are always kept to strictly."""

    name: Text
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_if_it_says_so(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "`json_schema` goes with `type`: json_schema, and only with that"
            raise fail(message, param="json_schema")
        return self


class StructuredOutputsFields(StrictBody):
    """vLLM's `structured_outputs`."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "disable_fallback": (None, False),
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
        "whitespace_pattern": (None,),
        "structural_tag": (None,),
    }

    json_: Text | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None


class StructuredBody(StrictBody):
    """A body that may ask for a form, in one way."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = Field(
        default=None, description="An extension, of which one field: the text has this form."
    )
    guided_json: Text | dict[str, Any] | None = Field(default=None, description="An extension.")
    guided_regex: Text | None = Field(default=None, description="An extension.")
    guided_choice: list[Text] | None = Field(default=None, description="An extension.")
    guided_grammar: Text | None = Field(default=None, description="An extension.")

    @model_validator(mode="after")
    def _one_form(self) -> StructuredBody:
        if len(names := self._form_fields) > 1:
            raise fail(f"`{names[0]}` and `{names[1]}` both say a form; give one", param=names[1])
        return self

    @property
    def _form_fields(self) -> list[str]:
        has_format = self.response_format is not None and self.response_format.type != "text"
        given = [
            name for name in ("structured_outputs", *_GUIDED) if getattr(self, name) is not None
        ]
        return ["response_format", *given] if has_format else given

    @property
    def form_field(self) -> str:
        """The field that asks for a form."""
        return next(iter(self._form_fields), "structured_outputs")

    def form(self) -> StructuredOutputs | None:
        """The form that is asked for, if any. Raises InvalidRequest."""
        if not self._form_fields:
            return None
        field, asked = self.form_field, self.structured_outputs
        if field == "response_format":
            wanted = self.response_format and self.response_format.json_schema
            if wanted is None:
                return StructuredOutputs(json_object=True)
            return StructuredOutputs(json=wanted.schema_)
        if asked is not None:
            return StructuredOutputs(
                json=asked.json_,
                json_object=bool(asked.json_object),
                regex=asked.regex,
                choice=None if asked.choice is None else tuple(asked.choice),
                grammar=asked.grammar,
            )
        return StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=None if self.guided_choice is None else tuple(self.guided_choice),
            grammar=self.guided_grammar,
        )
