"""Parallel samples: one prompt, computed once, and many answers.

The samples of a prompt are requests of their own that know one another, its *branches*. Whichever
comes first computes the prompt while the others wait. In the step that completes it they take the
seats that are free, share all its blocks by reference count, and draw their first tokens from the
same logits; the first write to the block that the prompt ends in copies it. Branches for which
there was no seat come later, and find the prompt in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .beam_search import BeamSearchParams
from .outputs import Completion, Logprobs
from .request import Request
from .sampling_params import SamplingParams

Work = Sequence[tuple[Request, int]]


@dataclass(frozen=True, kw_only=True)
class Join:
    """A branch that goes on from the prompt that another one completes in this step."""

    branch: Request
    leader: Request


def branch_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each branch.

    Raises:
        InvalidRequest: the last seeds are out of range.
    """
    count = params.num_branches
    logprobs = params.logprobs
    if count > params.n and logprobs is None:
        logprobs = 0  # what they are compared by
    seeds = [None if params.seed is None else params.seed + i for i in range(count)]
    return [replace(params, n=1, best_of=None, seed=seed, logprobs=logprobs) for seed in seeds]


def best(
    answers: Sequence[Completion], params: SamplingParams | BeamSearchParams
) -> list[Completion]:
    """Of the answers to a prompt those that are returned: for `best_of`, by `mean_logprob`."""
    if isinstance(params, BeamSearchParams) or len(answers) == params.n:
        return list(answers)
    kept = sorted(answers, key=lambda a: -mean_logprob(a.token_ids, a.logprobs or ()))[: params.n]
    return kept if params.logprobs is not None else [replace(a, logprobs=None) for a in kept]


def mean_logprob(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> float:
    """Mean log probability of the tokens of a text; -inf of one that has none."""
    own = [entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=True)]
    return sum(own) / len(own) if own else -math.inf


def waits_for_prompt(request: Request) -> bool:
    """Whether another branch is computing the prompt of this one."""
    return request.num_generated == 0 and any(
        other.seat is not None and other.num_generated == 0 for other in request.branches
    )


def joins(work: Work) -> list[Join]:
    """Branches that can join a step of (request, tokens), if there are seats."""
    return [
        Join(branch=branch, leader=request)
        for request, count in work
        if request.num_computed + count == request.num_prompt_tokens == request.num_tokens
        for branch in request.branches
        if branch.num_generated == 0 and branch.seat is None and branch.finish_reason is None
    ]


def joined_work(work: Work, joining: Sequence[Join]) -> list[tuple[Request, int]]:
    """The step with its joining branches: each after its leader, with no token of its own.

    A row of no tokens gets the logits of the token before it, which is the last one of the prompt.
    """
    return [
        row
        for request, count in work
        for row in [(request, count), *((j.branch, 0) for j in joining if j.leader is request)]
    ]
