"""Turning generated tokens into text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.tokenizer import Detokenizer


class TextStream:
    """The text of one request as it grows.

    Text that may yet turn out to be the start of a stop string is held back, so that what has
    been given out never has to be taken back.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]):
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def add(self, token_id: int) -> tuple[str, bool]:
        """Take a token; returns (text that became certain, whether a stop string ended it)."""
        self._held += self._detokenizer.add([token_id])
        return self._release(final=False)

    def skip(self, token_id: int) -> tuple[str, bool]:
        """Take a token as `add` does, but look for no stop string in it or before it."""
        text, self._held = self._held + self._detokenizer.add([token_id]), ""
        return text, False

    def flush(self) -> tuple[str, bool]:
        """Take the end of the sequence; returns as `add` does, with all that was held back."""
        self._held += self._detokenizer.flush()
        return self._release(final=True)

    def _release(self, *, final: bool) -> tuple[str, bool]:
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = 0 if final else self._possible_start()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
