"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..paged import NamespaceKey
from .adapters import Adapter
from .grammars import Grammar
from .held import Hold
from .loads import Restore
from .outputs import FinishReason, Logprobs, RequestOutput
from .sampling_params import SamplingParams
from .stops import TextStream


@dataclass(kw_only=True, eq=False)
class Request:
    """The host's side of one request.

    Attributes:
        tokens: `int32[capacity]` prompt and generated tokens; the first `num_tokens` count.
        num_prompt_tokens, num_tokens: lengths.
        max_tokens: generated tokens at most, resolved.
        stop_ids: tokens that end it.
        seed: `uint32` value.
        namespace: id of what it may share blocks with.
        namespace_key: the same in full.
        adapter: whose weights it runs with beside the model's, if anybody's.
        number: counts requests, from 1, as they arrive.
        grammar: where its text is in the form that it must have, if any.
        seat: its row while it runs, else None.
        priority: lower values run first, under that policy.
        num_setbacks: later requests that started while this one waited, and preemptions.
        num_computed: tokens whose keys and values are in the cache.
        num_published: blocks that the index has seen.
        num_cached_tokens: prompt tokens found in the cache when it was first admitted.
        prompt_logprobs: one for each prompt token where they are wanted, None for the first.
        hold: what keeps its blocks when it ends, if anything does.
        branches: all samples of its prompt, itself included, or nothing if it is the only one.
        shares_tail: whether others may hold the block that its next token goes to.
        restore: what it still gets from a lower tier, if anything.
        block_keys: what its first blocks are called there, as far as anybody asked.
    """

    request_id: str
    params: SamplingParams
    tokens: np.ndarray
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    namespace: int
    namespace_key: NamespaceKey
    number: int
    text: TextStream
    adapter: Adapter | None = None
    grammar: Grammar | None = None
    seat: int | None = None
    priority: int = 0
    num_setbacks: int = 0
    num_computed: int = 0
    num_published: int = 0
    num_cached_tokens: int | None = None
    hold: Hold | None = None
    branches: Sequence[Request] = field(default=(), repr=False)
    shares_tail: bool = False
    restore: Restore | None = None
    # A copy of a request may go on with other tokens: it begins without.
    block_keys: list[bytes] = field(default_factory=list, init=False, repr=False)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    _new_text: list[str] = field(default_factory=list)
    _new_tokens: list[int] = field(default_factory=list)
    _new_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_computed(self) -> int:
        """Most tokens that are ever computed: the last one it may generate is not."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def needs_prefill(self) -> bool:
        """Whether more than the newest token waits to be computed."""
        return self.num_computed < self.num_tokens - 1 or self.num_generated == 0

    @property
    def waits_for_blocks(self) -> bool:
        """Whether it cannot go on before more has come from a lower tier."""
        return self.restore is not None and self.num_computed >= self.restore.start_token

    @property
    def num_to_compute(self) -> int:
        """Tokens that can be computed now, one after the other."""
        end = self.num_tokens if self.restore is None else self.restore.start_token
        return end - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether it has yet to find out how likely its prompt's tokens are."""
        return self.params.prompt_logprobs is not None and self.num_generated == 0

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens

    def add_token(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Take a sampled token and decide whether it is the last."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self._new_tokens.append(token_id)
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        if token_id in self.stop_ids:
            self.end("stop")
            return
        take = self.text.add if self.num_generated > self.params.min_tokens else self.text.skip
        text, stopped = take(token_id)
        self._new_text.append(text)
        if stopped:
            self.finish_reason = "stop"
        elif self.grammar is not None and not self.grammar.accept(token_id):
            self.end("cancelled")
        elif self.grammar is not None and self.grammar.finished:
            self.end("stop")
        elif self.num_generated >= self.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        """Finish with what text there is, unless that ends in a stop string."""
        text, stopped = self.text.flush()
        self._new_text.append(text)
        self.finish_reason = "stop" if stopped else reason

    def take_output(self) -> RequestOutput:
        """What was gained since the last call."""
        prompt_logprobs = None
        if self.prompt_logprobs and self.num_generated > 0:
            prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        output = RequestOutput(
            request_id=self.request_id,
            text="".join(self._new_text),
            token_ids=tuple(self._new_tokens),
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_generated_tokens=self.num_generated,
            logprobs=None if self.params.logprobs is None else tuple(self._new_logprobs),
            prompt_logprobs=prompt_logprobs,
        )
        self._new_text.clear()
        self._new_tokens.clear()
        self._new_logprobs.clear()
        return output
