"""The bytes that a token stands for: half a character too, which no text can show."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an optional dependency: whoever has a tokenizer has it
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes of the tokens of one tokenizer: byte-level ones, and SentencePiece's with byte tokens.

    Joined over the ids of a text they are its UTF-8, but for a space that SentencePiece writes in
    front of a text and its decoder takes away again.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        # Of the decoder alone: a whole tokenizer is megabytes of text.
        decoder = backend.decoder
        kinds = _kinds(None if decoder is None else json.loads(decoder.__getstate__()))
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        written = self._backend.id_to_token(token_id) or ""
        if self._alphabet is not None:
            return b"".join([self._alphabet.get(c, c.encode()) for c in written])
        if byte := _BYTE.fullmatch(written):
            return bytes([int(byte[1], 16)])
        return written.replace("\u2581", " ").encode()


def _kinds(decoder: Any) -> set[str]:
    """Types of a decoder and of those it is made of."""
    if not isinstance(decoder, dict):
        return set()
    inner = (_kinds(part) for part in decoder.get("decoders", ()))
    return {decoder.get("type", "")}.union(*inner)


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's character for each byte: printable ones are themselves, the others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
