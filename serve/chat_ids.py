"""A conversation as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models import ChatTemplateError, LoadedModel


def chat_ids(loaded: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation as the model's template writes it, up to where the answer begins.

    Raises:
        ChatTemplateError: the model has no template, or that refuses the conversation.
    """
    if loaded.chat_template is None:
        raise ChatTemplateError(f"{loaded.name} has no chat template")
    text = loaded.chat_template.render(messages)
    # The template writes the special tokens itself.
    return loaded.tokenizer.encode(text, add_special_tokens=False)
