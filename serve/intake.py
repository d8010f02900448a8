"""Checking what comes in, before anything changes, and making requests of it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

import numpy as np

from ..models import LoadedModel
from ..models.tokenizer import NUM_CONTEXT_IDS
from ..paged import NamespaceKey, Namespaces
from .adapters import Adapters
from .grammars import Grammars
from .layout import CacheLayout
from .request import Request
from .sampling_params import MAX_LOGIT_BIAS, MAX_LOGIT_EDITS, InvalidRequest, SamplingParams
from .stops import TextStream

Prompt = str | Sequence[int]

_LONGEST_SALT = 64


class Intake:
    """Makes requests that the engine can serve, and refuses the others."""

    def __init__(
        self, loaded: LoadedModel, layout: CacheLayout, block_size: int, adapters: Adapters
    ):
        self.loaded = loaded
        self._adapters = adapters
        self._layout = layout
        # The newest token is never written to the cache, so one more fits than there are slots.
        self._most_tokens = (layout.shape[0] - 1) * block_size + 1
        self.namespaces = Namespaces()
        self.grammars = Grammars()
        self._num_requests = 0

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str,
        request_id: str,
        adapter: str | None,
    ) -> Request:
        """The request, checked.

        Raises:
            InvalidRequest: it can never be served.
        """
        tokens, key = self._prompt_tokens(prompt), self.namespace_key(cache_salt, adapter)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        max_tokens = self._max_tokens(len(tokens), params)
        buffer = np.zeros(len(tokens) + max_tokens, np.int32)
        buffer[: len(tokens)] = tokens
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.loaded.eos_token_ids)
        self._check_min_tokens(params, max_tokens, stop_ids)
        form = params.structured_outputs
        grammar = None if form is None else self.grammars.start(self.loaded, form)
        self._num_requests += 1
        return Request(
            request_id=request_id,
            params=params,
            tokens=buffer,
            num_prompt_tokens=len(tokens),
            num_tokens=len(tokens),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            seed=secrets.randbits(32) if params.seed is None else params.seed % (1 << 32),
            namespace=self.namespaces.id_of(key),
            namespace_key=key,
            grammar=grammar,
            adapter=self._adapters.named(adapter),
            number=self._num_requests,
            text=TextStream(
                self.loaded.tokenizer.detokenizer(tokens[-NUM_CONTEXT_IDS:].tolist()), params.stop
            ),
        )

    def prompt(
        self, prompt: Prompt, cache_salt: str, adapter: str | None
    ) -> tuple[np.ndarray, int]:
        """A prompt's tokens `int32[n]` and namespace.

        Raises:
            InvalidRequest: it can never be served.
        """
        tokens, key = self._prompt_tokens(prompt), self.namespace_key(cache_salt, adapter)
        return tokens, self.namespaces.id_of(key)

    def namespace_key(self, cache_salt: str, adapter: str | None) -> NamespaceKey:
        """What the blocks of a prompt depend on beside its tokens.

        Raises:
            InvalidRequest: the adapter is not loaded.
        """
        own = self._adapters.named(adapter)
        if len(cache_salt) > _LONGEST_SALT:
            # Namespaces are kept for good, so a long salt is kept as what stands for it.
            digest = hashlib.sha256(cache_salt.encode(errors="surrogatepass"))
            cache_salt = f"sha256:{digest.hexdigest()}"
        return NamespaceKey(
            model=self.loaded.fingerprint,
            cache_dtype=self._layout.dtype.name,
            adapter="" if own is None else own.name,
            adapter_version="" if own is None else own.version,
            salt=cache_salt,
        )

    def _prompt_tokens(self, prompt: Prompt) -> np.ndarray:
        vocab = self.loaded.config.vocab_size
        ids = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if len(ids) >= self._layout.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the context holds "
                f"{self._layout.max_model_len} with at least one to generate",
                param="prompt",
            )
        # By kinds and extremes: a long prompt that hits has nothing else to wait for.
        kinds = set(map(type, ids))
        if bool in kinds or not all(issubclass(kind, int | np.integer) for kind in kinds):
            token = next(t for t in ids if type(t) is bool or not isinstance(t, int | np.integer))
            raise InvalidRequest(f"token {token!r} must be an integer", param="prompt")
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary [0, {vocab})", param="prompt"
                )
        return np.asarray(ids, np.int32)

    def _check_ids(self, param: str, token_ids: Iterable[int]) -> None:
        vocab = self.loaded.config.vocab_size
        for token in token_ids:
            if token >= vocab:
                raise InvalidRequest(
                    f"{param} holds {token}, outside the vocabulary [0, {vocab})", param=param
                )

    def _check_min_tokens(
        self, params: SamplingParams, max_tokens: int, stop_ids: frozenset[int]
    ) -> None:
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens={params.min_tokens}, but at most {max_tokens} fit", param="min_tokens"
            )
        banned = MAX_LOGIT_EDITS - MAX_LOGIT_BIAS
        if params.min_tokens and len(stop_ids) > banned:
            raise InvalidRequest(
                f"min_tokens can hold off {banned} stop tokens, not {len(stop_ids)}",
                param="min_tokens",
            )

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        room = min(self._layout.max_model_len, self._most_tokens) - num_prompt
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; the KV cache holds "
                f"{self._most_tokens - 1}: it can never fit. Give the cache more blocks",
                param="prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens={params.max_tokens} and a prompt of {num_prompt} tokens do not fit "
                f"the context of {self._layout.max_model_len} and the KV cache of "
                f"{self._most_tokens - 1}; at most {room} fit",
                param="max_tokens",
            )
        return room if params.max_tokens is None else params.max_tokens
