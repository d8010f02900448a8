"""Beam search: which continuations live on, which are finished, and when it is over.

Every beam is continued by its likeliest tokens, and the `beam_width` best of all of these that do
not end go on. Those that end compete for `beam_width` places by their score, the sum of their log
probabilities over their length to the power of `length_penalty`. The rules are those of Hugging
Face transformers, and so are the results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from .sampling_params import MAX_LOGPROBS, InvalidRequest


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: beams that are followed side by side.
        max_tokens: most tokens of an answer.
        length_penalty: above 0 favours long answers, below 0 short ones.
        early_stopping: True stops as soon as `beam_width` answers are finished; False when the
            best beam, as long as it is now, would not be among them; "never" when it would not be
            at any length.
        num_return_sequences: answers returned, the best ones.
        stop_token_ids: tokens that end an answer.
        ignore_eos: go on past the model's end-of-sequence tokens.

    Raises:
        InvalidRequest: a value is out of range.
    """

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(param: str, valid: bool, expected: str) -> None:
            if not valid:
                value = getattr(self, param)
                raise InvalidRequest(f"{param}={value!r} must be {expected}", param=param)

        def count(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        penalty = self.length_penalty
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        check("beam_width", count(self.beam_width), "an integer of at least 1")
        check("max_tokens", count(self.max_tokens), "an integer of at least 1")
        check("length_penalty", number and -10 <= penalty <= 10, "a number between -10 and 10")
        check(
            "early_stopping",
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            'true, false or "never"',
        )
        check(
            "num_return_sequences",
            count(self.num_return_sequences) and self.num_return_sequences <= self.beam_width,
            f"an integer in [1, beam_width={self.beam_width}]",
        )

    @property
    def num_branches(self) -> int:
        """Answers that are made."""
        return self.num_return_sequences


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A continuation of the prompt.

    Attributes:
        tokens: what was generated.
        score: the sum of its log probabilities; of a finished one, over the length penalty.
    """

    tokens: tuple[int, ...]
    score: float


class BeamSelection:
    """The beams of one search, without their keys and values.

    Args:
        params: how to search.
        stop_ids: tokens that end an answer.

    Attributes:
        running: the beams to continue, best first.
        finished: the best answers so far, best first.
        done: whether these are final.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: Collection[int]):
        self._params = params
        self._stop_ids = stop_ids
        self.running = [Beam(tokens=(), score=0.0)]
        self.finished: list[Beam] = []
        self.done = False

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Take one more token everywhere.

        Args:
            likeliest: (token, log probability) of each running beam, best first: as many as
                `num_candidates` says.

        Returns:
            For each beam that runs now the one before that it continues.
        """
        width = self._params.beam_width
        candidates = [
            (beam.score + logprob, parent, token)
            for parent, (beam, tokens) in enumerate(zip(self.running, likeliest, strict=True))
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        length = len(self.running[0].tokens) + 1
        ends_all = length == self._params.max_tokens
        running, parents = [], []
        for rank, (score, parent, token) in enumerate(candidates):
            beam = Beam(tokens=(*self.running[parent].tokens, token), score=score)
            if ends_all or token in self._stop_ids:
                # A worse one is looked at only so that enough others go on.
                if rank < width:
                    self._finish(beam)
            elif len(running) < width:
                running.append(beam)
                parents.append(parent)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.done = ends_all or not running or self._is_decided(running[0].score, length)
        self.running = running
        return parents

    def _finish(self, beam: Beam) -> None:
        score = beam.score / len(beam.tokens) ** self._params.length_penalty
        self.finished.append(Beam(tokens=beam.tokens, score=score))

    def _is_decided(self, best_score: float, length: int) -> bool:
        """Whether no running beam can get among the finished ones any more."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        return best_score / length**params.length_penalty <= self.finished[-1].score


def num_candidates(params: BeamSearchParams, stop_ids: Collection[int]) -> int:
    """Likeliest tokens of a beam that can matter: so many that `beam_width` of them do not end it.

    Raises:
        InvalidRequest: more than a step reports.
    """
    count = params.beam_width + len(stop_ids)
    if count > MAX_LOGPROBS:
        raise InvalidRequest(
            f"beam_width={params.beam_width} and {len(stop_ids)} tokens that end an answer are "
            f"{count} together; at most {MAX_LOGPROBS} are possible",
            param="beam_width",
        )
    return count
