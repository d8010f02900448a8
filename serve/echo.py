"""What completions with `echo` repeat of a prompt, and how `prompt_logprobs` are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..models import Tokenizer
from .outputs import Logprobs


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A prompt that stands before each of its answers: its text and its tokens."""

    text: str
    token_ids: Sequence[int]

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: Tokenizer) -> Echo:
        """A prompt as it was given: token ids show the text that they stand for."""
        if isinstance(prompt, str):
            return cls(text=prompt, token_ids=tokenizer.encode(prompt))
        return cls(text=tokenizer.decode(prompt), token_ids=prompt)


def prompt_logprobs_body(
    tokenizer: Tokenizer, entries: Sequence[Logprobs | None] = ()
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token an object by token id, and null for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
            }
            for token, one in entry.items()
        }
        for entry in entries
    ]
