"""Sequences to work with: text that grows, forks and grows on, for agents and trees of thought.

    with engine.sequence("Three ways to cross the river:\\n1.") as root:
        branches = [root.fork() for _ in range(4)]
        answers = generate_together(branches, SamplingParams(max_tokens=32))
        best = max(branches, key=lambda branch: score(branch.text))
        best.append("\\n2.").generate(SamplingParams(temperature=0, max_tokens=32))

A sequence keeps its blocks referenced between generations, so that it goes on where it stopped. A
fork shares all of them and copies none; the first token that either of them writes to a shared
block copies that block. As many sequences are held as the engine has seats (`max_num_seqs`), and
only as long as running requests can do without their blocks: the one not used for longest is let
go first. It loses nothing but the guarantee: its blocks are cached like everybody's, and what has
been evicted when it goes on is computed again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .held import Hold
from .intake import Intake, Prompt
from .outputs import Completion, RequestOutput
from .runner import ModelRunner
from .sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from .answers import Answers

_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Branch:
    """A sequence that stays, and can be forked. Made by `Engine.sequence` and `fork`.

    Use it as a context manager, or `release` it, or let it be collected.
    """

    def __init__(
        self,
        engine: Answers,
        intake: Intake,
        runner: ModelRunner,
        prompt: Prompt,
        *,
        cache_salt: str,
        adapter: str | None,
    ):
        tokens, _ = intake.prompt(prompt, cache_salt, adapter)
        self._tokens: list[int] = tokens.tolist()
        self._engine, self._intake, self._runner = engine, intake, runner
        self._sharing = {"cache_salt": cache_salt, "adapter": adapter}
        self._hold: Hold | None = Hold()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens: the prompt, what was appended, and what was generated, stop tokens too."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """The whole text."""
        return self._engine.loaded.tokenizer.decode(self._tokens)

    def append(self, more: Prompt) -> Branch:
        """Add text, or token ids, to go on from; computed when it is needed.

        Raises:
            InvalidRequest: not tokens of this model, or too many; nothing has changed.
        """
        self._held()
        if isinstance(more, str):
            more = self._engine.loaded.tokenizer.encode(more, add_special_tokens=False)
        longer = [*self._tokens, *more]
        tokens, _ = self._intake.prompt(longer, **self._sharing)
        self._tokens = tokens.tolist()
        return self

    def fork(self) -> Branch:
        """Another sequence that begins as this one; what both share is computed at most once."""
        hold = self._held()
        caches = self._engine.config.enable_prefix_caching
        if caches and hold.num_tokens < len(self._tokens) - 1:
            # A generated token more or less: what counts is what it leaves in the cache.
            with self._request(_ONE_TOKEN) as request_id:
                self._engine.collect([request_id])
        other = Branch(self._engine, self._intake, self._runner, self._tokens, **self._sharing)
        self._runner.fork_hold(hold, other._held())
        return other

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Go on from here; what is generated becomes part of the sequence.

        Raises:
            InvalidRequest: it cannot be served; nothing has changed.
        """
        return generate_together([self], params)[0]

    def stream(self, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """As `generate`, yielding text as it comes; leaving the loop stops where it is."""
        with self._request(params) as request_id:
            for output in self._engine.follow(request_id):
                self._tokens += output.token_ids
                yield output

    def release(self) -> None:
        """Let go of the blocks, which stay cached; the sequence can be read but not continued."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._runner.spare_rows.let_go(hold)

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _held(self) -> Hold:
        if self._hold is None:
            raise ValueError("the sequence has been released; fork one that has not")
        return self._hold

    @contextmanager
    def _request(self, params: SamplingParams | None) -> Generator[str, None, None]:
        request_id = self._add(params)
        try:
            yield request_id
        finally:
            self._engine.cancel(request_id)

    def _add(self, params: SamplingParams | None) -> str:
        if params is not None and params.n != 1:
            message = f"n={params.n} answers: fork the sequence, and let each fork generate"
            raise InvalidRequest(message, param="n")
        return self._engine.add_request(self._tokens, params, hold=self._held(), **self._sharing)


def generate_together(
    branches: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Completion]:
    """Let sequences of one engine go on side by side, in one batch.

    Args:
        branches: the sequences, all different.
        params: one for all, or one for each.

    Returns:
        What each of them generated, in their order.

    Raises:
        ValueError: a sequence stands twice, belongs to another engine or has been released.
        InvalidRequest: one cannot be served; none has changed.
    """
    each = list(params) if isinstance(params, Sequence) else [params] * len(branches)
    if len(each) != len(branches):
        raise ValueError(f"{len(each)} sampling params for {len(branches)} sequences")
    if len({id(branch) for branch in branches}) < len(branches):
        raise ValueError("a sequence stands twice; fork it")
    if not branches:
        return []
    engine = branches[0]._engine
    if any(branch._engine is not engine for branch in branches):
        raise ValueError("the sequences belong to different engines")
    ids: list[str] = []
    try:
        for branch, own in zip(branches, each, strict=True):
            ids.append(branch._add(own))
        answers = engine.collect(ids)
    finally:
        for request_id in ids:
            engine.cancel(request_id)
    for branch, answer in zip(branches, answers, strict=True):
        branch._tokens += answer.token_ids
    return answers
