"""What a request asks for: how to sample, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass


class InvalidRequest(ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        param: the field at fault, as the API names it.
    """

    def __init__(self, message: str, *, param: str):
        super().__init__(message)
        self.param = param


_MAX_SEED = 1 << 63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample the tokens of one request.

    Attributes:
        max_tokens: most tokens to generate; None means up to the context length.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens (ties included); 0 means all.
        top_p: sample among the likeliest tokens that hold this probability together.
        min_p: drop tokens below this fraction of the likeliest one's probability.
        seed: makes the text repeatable, whatever runs beside it; None draws one.
        stop: strings that end the text, which leaves them out.
        stop_token_ids: tokens that end the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        timeout_s: end the text, as it stands, so many seconds after the request came.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        def check(param: str, valid: bool, expected: str) -> None:
            if not valid:
                value = getattr(self, param)
                raise InvalidRequest(f"{param}={value!r} must be {expected}", param=param)

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
            integer(self.top_k) and 0 <= self.top_k < 1 << 31,
            "an integer of at least 0 (0 means all tokens)",
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
