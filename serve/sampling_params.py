"""What a request asks for: how to sample, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .invalid_request import InvalidRequest as InvalidRequest
from .structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
# OpenAI's limit for `logit_bias`, and room for the stop tokens that `min_tokens` bans.
MAX_LOGIT_BIAS = 300
MAX_LOGIT_EDITS = 512


_MAX_SEED = 1 << 63
MAX_BRANCHES = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample the tokens of one request.

    Attributes:
        max_tokens: most tokens to generate; None means up to the context length.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens (ties included); 0 or -1 means all.
        top_p: sample among the likeliest tokens that hold this probability together.
        min_p: drop tokens below this fraction of the likeliest one's probability.
        repetition_penalty: divides positive logits of tokens of prompt and text, and multiplies
            negative ones; 1 does nothing.
        presence_penalty: subtracted from the logits of tokens that the text holds.
        frequency_penalty: subtracted as many times as the text holds the token.
        logit_bias: added to the logits of these tokens, before the penalties; at most 300.
        seed: makes the text repeatable, whatever runs beside it; None draws one.
        stop: strings that end the text, which leaves them out.
        stop_token_ids: tokens that end the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        timeout_s: end the text, as it stands, so many seconds after the request came.
        min_tokens: until so many tokens are there none ends the text, and no stop string does.
        logprobs: report how likely each token was, and this many of the likeliest (0 to 20), by
            the model's own distribution; None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt, which is then computed whole,
            whatever the cache holds of it.
        structured_outputs: the form that the text must have.
        n: answers to the prompt, which they share; answer i takes the seed `seed + i`.
        best_of: so many are made, and the `n` of the highest mean log probability of a token are
            returned, the best first; None means `n`.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        def check(param: str, valid: bool, expected: str) -> None:
            if not valid:
                value = getattr(self, param)
                raise InvalidRequest(f"{param}={value!r:.80} must be {expected}", param=param)

        def number(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool)

        def integer(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        check(
            "max_tokens",
            self.max_tokens is None or (integer(self.max_tokens) and self.max_tokens >= 1),
            "an integer of at least 1",
        )
        check(
            "temperature",
            number(self.temperature) and 0 <= self.temperature <= 100,
            "a number between 0 and 100",
        )
        check(
            "top_k",
            integer(self.top_k) and -1 <= self.top_k < 1 << 31,
            "an integer of at least -1 (0 and -1 mean all tokens)",
        )
        check(
            "top_p",
            number(self.top_p) and 0 < self.top_p <= 1,
            "a number above 0 and at most 1",
        )
        check("min_p", number(self.min_p) and 0 <= self.min_p <= 1, "a number between 0 and 1")
        check(
            "timeout_s",
            self.timeout_s is None or (number(self.timeout_s) and 0 < self.timeout_s < math.inf),
            "a number of seconds above 0",
        )
        check(
            "repetition_penalty",
            number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
            "a number between 0.01 and 100",
        )
        for penalty in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, penalty)
            check(penalty, number(value) and -2 <= value <= 2, "a number between -2 and 2")
        bias = self.logit_bias
        check(
            "logit_bias",
            bias is None
            or (
                isinstance(bias, Mapping)
                and len(bias) <= MAX_LOGIT_BIAS
                and all(integer(token) and token >= 0 for token in bias)
                and all(number(value) and -100 <= value <= 100 for value in bias.values())
            ),
            f"at most {MAX_LOGIT_BIAS} token ids with numbers between -100 and 100",
        )
        check(
            "seed",
            self.seed is None or (integer(self.seed) and -_MAX_SEED <= self.seed < _MAX_SEED),
            "a 64-bit integer",
        )
        check(
            "stop",
            isinstance(self.stop, tuple)
            and len(self.stop) <= 64
            and all(isinstance(s, str) and s for s in self.stop),
            "at most 64 strings, none of them empty",
        )
        check(
            "stop_token_ids",
            isinstance(self.stop_token_ids, tuple)
            and all(integer(t) and t >= 0 for t in self.stop_token_ids),
            "token ids of at least 0",
        )
        check(
            "min_tokens",
            integer(self.min_tokens)
            and 0 <= self.min_tokens < 1 << 31
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "an integer of at least 0 and at most max_tokens",
        )
        for report in ("logprobs", "prompt_logprobs"):
            value = getattr(self, report)
            check(
                report,
                value is None or (integer(value) and 0 <= value <= MAX_LOGPROBS),
                f"an integer between 0 and {MAX_LOGPROBS}",
            )
        form = self.structured_outputs
        check(
            "structured_outputs",
            form is None or isinstance(form, StructuredOutputs),
            "an object of StructuredOutputs",
        )
        if form is not None and self.min_tokens:
            message = "min_tokens cannot hold off the end of a structured output"
            raise InvalidRequest(message, param="min_tokens")
        check("n", integer(self.n) and 1 <= self.n <= MAX_BRANCHES, f"in [1, {MAX_BRANCHES}]")
        check(
            "best_of",
            self.best_of is None
            or (integer(self.best_of) and self.n <= self.best_of <= MAX_BRANCHES),
            f"in [n, {MAX_BRANCHES}]",
        )

    @property
    def num_branches(self) -> int:
        """Answers that are made."""
        return self.best_of or self.n
