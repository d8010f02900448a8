"""Chat templates: from messages to the prompt that a model was trained on.

A template is Jinja, written by whoever published the model. It runs in Jinja's immutable sandbox
with the names that Hugging Face gives to templates, and no others: it cannot reach files, code or
the caller's messages. It can still take time and memory without end, like any program.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .safetensors_io import read_json_object
from .weights import WeightsError, map_file

if TYPE_CHECKING:  # an optional dependency: imported where it is used
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
GGUF_KEY = "tokenizer.chat_template"


class ChatTemplateError(ValueError):
    """A chat template that cannot be used, or that refuses the messages."""


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, and sorts keys.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; it renders as it is."""

        tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled chat template and the special tokens that it may write."""

    def __init__(
        self, source: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        """Compile the template.

        Raises:
            ChatTemplateError: it is not a valid template.
        """
        from jinja2 import TemplateError

        self.source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {key: token for key, token in tokens.items() if token is not None}
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages`, each with a `role` and a `content`.

        It contains the special tokens: encode it with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: the template refused the messages or failed on them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # the template is a program: it may raise anything
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def chat_template_from_directory(
    directory: Path, *, bos_token: str | None, eos_token: str | None
) -> ChatTemplate | None:
    """The template in `chat_template.jinja` or `tokenizer_config.json`, or None.

    Raises:
        ChatTemplateError: it is not a valid template, or there are several and no "default".
        WeightsError: a file is broken.
    """
    path = directory / TEMPLATE_FILE
    config_path = directory / "tokenizer_config.json"
    if path.is_file():
        try:
            source = map_file(path)[:].decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path}: not UTF-8: {error}") from error
    elif config_path.is_file():
        source = read_json_object(config_path).get("chat_template")
    else:
        return None
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, Mapping)}
        if "default" not in named:
            raise ChatTemplateError(
                f"{config_path}: chat_template has no template named 'default', only {list(named)}"
            )
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise ChatTemplateError(f"{config_path}: chat_template is a {type(source).__name__}")
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
