"""Which tokens may come next in a text of a given form, by the library llguidance.

The host follows each constrained text through its grammar and computes a mask of the vocabulary
for its next token, which the device applies: such a text takes one step per dispatch.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from ..models import LoadedModel, Tokenizer
from .invalid_request import InvalidRequest
from .structured_outputs import StructuredOutputs

if TYPE_CHECKING:  # an optional dependency: imported where it is used
    import llguidance

logger = logging.getLogger(__name__)

_MAX_KEPT = 32


class Grammar:
    """One text's way through its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if the text can no longer be followed."""
        if self._matcher.consume_token(token_id):
            return True
        logger.warning("a structured output was given up: %s", self._matcher.get_error())
        return False

    def fill(self, bits: np.ndarray) -> None:
        """Write which tokens may come next, a bit each, to `bits: int32[ceil(V / 32)]`."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            bits[:] = -1  # whatever comes is refused by `accept`, which says why


class _Compiled:
    """A grammar that is compiled by whoever asks for it first, while the others wait."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, wanted: StructuredOutputs):
        self._lock = threading.Lock()
        self._tokenizer, self._wanted = tokenizer, wanted
        self._matcher: llguidance.LLMatcher | None = None

    def start(self) -> Grammar:
        with self._lock:
            if self._matcher is None:
                self._matcher = _compile(self._tokenizer, self._wanted)
            return Grammar(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars, and keeps those of late. May be called from several threads.

    A grammar that takes long keeps nobody waiting who wants another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizer: tuple[Tokenizer, llguidance.LLTokenizer] | None = None
        self._kept: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()

    def start(self, loaded: LoadedModel, wanted: StructuredOutputs) -> Grammar:
        """The beginning of a text of the wanted form.

        Raises:
            InvalidRequest: there is no such form, or the package or the model cannot do it.
        """
        with self._lock:
            if self._tokenizer is None or self._tokenizer[0] is not loaded.tokenizer:
                self._tokenizer = loaded.tokenizer, _tokenizer_of(loaded)
                self._kept.clear()
            key = wanted.kind, wanted.source
            compiled = self._kept.pop(key, None) or _Compiled(self._tokenizer[1], wanted)
            self._kept[key] = compiled
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled.start()


def _tokenizer_of(loaded: LoadedModel) -> llguidance.LLTokenizer:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise _refuse(
            "structured output needs llguidance; install it with: pip install 'octavo[models]'"
        ) from None
    if not loaded.eos_token_ids:
        raise _refuse("structured output needs a model that knows a token to end a text with")
    return llguidance.LLTokenizer(
        loaded.tokenizer.to_json(),
        n_vocab=loaded.config.vocab_size,
        eos_token=list(loaded.eos_token_ids),
    )


def _compile(tokenizer: llguidance.LLTokenizer, wanted: StructuredOutputs) -> llguidance.LLMatcher:
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.kind == "json":
            # Space after commas and colons, as models have read it, and nowhere else: room for any
            # space is room for nothing but spaces. A schema says otherwise under "x-guidance".
            grammar = LLMatcher.grammar_from_json_schema(
                wanted.source,
                defaults={
                    "item_separator": ", ",
                    "key_separator": ": ",
                    "whitespace_flexible": False,
                },
            )
        else:
            grammar = grammar_from(wanted.kind, wanted.source)
    except (ValueError, TypeError) as error:
        raise _refuse(f"{wanted.kind} cannot be used: {error}") from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise _refuse(f"{wanted.kind} cannot be used: {matcher.get_error()}")
    return matcher


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {message:.300}", param="structured_outputs")
