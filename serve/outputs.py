"""What an engine gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..paged.tiers import TierStats

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """How likely a token was: the logarithm of its probability, and its rank (1 is the likeliest).

    By the model's own distribution, before temperature, penalties and whatever else narrows it.
    """

    logprob: float
    rank: int


Logprobs = Mapping[int, Logprob]
"""Of one place in a text, by token id: the token that came, then the likeliest ones in order."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one request gained in a step.

    Attributes:
        request_id: the request.
        text: text that became certain since the last output.
        token_ids: tokens generated since the last output.
        finish_reason: None while the request goes on.
        num_prompt_tokens: tokens in the prompt.
        num_cached_tokens: tokens of the prompt that were found in the cache.
        num_generated_tokens: tokens generated so far.
        logprobs: one for each of `token_ids`, or None if they are not wanted.
        prompt_logprobs: one for each token of the prompt, None for the first, in the first output
            that has tokens; None elsewhere, and if they are not wanted.
        score: of a beam search, what the answer is ranked by.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole answer to one prompt; fields as in `RequestOutput`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    score: float | None = None

    @classmethod
    def of(cls, parts: Sequence[RequestOutput]) -> Completion:
        """All outputs of one finished request as one."""
        last = parts[-1]
        assert last.finish_reason is not None
        return cls(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            finish_reason=last.finish_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            score=last.score,
            logprobs=None
            if last.logprobs is None
            else tuple(entry for part in parts for entry in part.logprobs or ()),
            prompt_logprobs=next((p.prompt_logprobs for p in parts if p.prompt_logprobs), None),
        )


@dataclass(frozen=True, kw_only=True)
class RestoreStats:
    """Choices between restoring and computing, and how they turned out.

    Attributes:
        num_restored, num_recomputed, num_split: choices; a split computes a part and restores
            the rest.
        predicted_seconds, actual_seconds: of those that were carried out to their end.
        regret_seconds: by which they took longer than the other way was predicted to take.
    """

    num_restored: int = 0
    num_recomputed: int = 0
    num_split: int = 0
    predicted_seconds: float = 0.0
    actual_seconds: float = 0.0
    regret_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Where an engine stands.

    Attributes:
        num_running, num_waiting: requests now.
        num_blocks: blocks in the pool, the null block not counted.
        num_free_blocks, num_cached_blocks, num_active_blocks: add up to `num_blocks`.
        prefix_query_tokens: prompt tokens looked up in the cache; once per request.
        prefix_hit_tokens: those that were found, below the device too.
        external_query_tokens, external_hit_tokens: of prompts with tiers below the device, the
            tokens that were looked up there, and those that came from there.
        prompt_tokens: prompt tokens of all admitted requests.
        prefilled_tokens: tokens that prefill steps computed, recomputation after a preemption
            included.
        generated_tokens: tokens generated.
        num_preemptions: times that a request gave back its blocks to let others go on.
        num_draft_tokens, num_accepted_tokens: tokens that speculation guessed, and those of them
            that were right.
        num_finished: requests that ended by themselves.
        num_cancelled: requests that were ended from outside.
        num_timed_out: requests whose `timeout_s` was over.
        restores: choices between restoring and computing.
        tiers: those below the device, by name.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_finished: int
    num_cancelled: int
    num_timed_out: int
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    restores: RestoreStats = RestoreStats()
    tiers: Mapping[str, TierStats] = field(default_factory=dict)


# What only ever grows.
COUNTERS: tuple[str, ...] = (
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "prefilled_tokens",
    "generated_tokens",
    "num_preemptions",
    "num_finished",
    "num_cancelled",
    "num_timed_out",
    "external_query_tokens",
    "external_hit_tokens",
)
