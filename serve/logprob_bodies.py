"""Logprobs as the two APIs write them, for a choice that is whole or comes in pieces.

A token may be part of a character. Both forms show its bytes: chats beside a text in which U+FFFD
stands for what is no character, completions, as OpenAI does, in a text of the form
`bytes:\\xf0\\x9f`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ..models import Tokenizer
from .outputs import Logprob, Logprobs

_LOWEST = -9999.0  # JSON has no infinity


class CompletionLogprobs:
    """OpenAI's older form, four lists, with where in the text of the choice each token begins."""

    def __init__(self, tokenizer: Tokenizer, num_top: int):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], prompt: str = ""
    ) -> dict[str, Any]:
        """The tokens that follow those of the last call, `prompt` being the text of the first.

        Special tokens are no part of the text unless they are written out in the prompt.
        """
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            raw = self._tokenizer.token_bytes(token)
            special = token in self._tokenizer.special_ids
            if not special or prompt.startswith(self._text(token), self._offset):
                self._offset += len(self._decoder.decode(raw))
        return {
            "tokens": [self._text(token) for token in token_ids],
            "token_logprobs": [
                entry and _number(entry[token])
                for token, entry in zip(token_ids, logprobs, strict=True)
            ],
            "top_logprobs": [
                entry and {self._text(token): _number(one) for token, one in entry.items()}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """OpenAI's newer form: one object for each token, with its bytes."""

    def __init__(self, tokenizer: Tokenizer, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top

    def body(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], prompt: str = ""
    ) -> dict[str, Any]:
        """The tokens that follow those of the last call; a chat shows none of its prompt."""
        content = [
            self._token(token, entry[token]) | {"top_logprobs": self._top(entry)}
            for token, entry in zip(token_ids, logprobs, strict=True)
            if entry is not None
        ]
        return {"content": content, "refusal": None}

    def _top(self, entry: Logprobs) -> list[dict[str, Any]]:
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[: self._num_top]
        return [self._token(token, one) for token, one in likeliest]

    def _token(self, token: int, one: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": _number(one), "bytes": list(raw)}


def _number(one: Logprob) -> float:
    return max(one.logprob, _LOWEST)
