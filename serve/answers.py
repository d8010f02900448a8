"""Whole answers and streams: running an engine until what was asked for is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ..models import LoadedModel
from .beam_search import BeamSearchParams
from .branching import best
from .config import EngineConfig
from .intake import Intake, Prompt
from .outputs import Completion, RequestOutput
from .runner import ModelRunner
from .sampling_params import SamplingParams
from .sequence import Branch

AnyParams = SamplingParams | BeamSearchParams


class Answers:
    """An engine as those use it who do not call `step` themselves."""

    loaded: LoadedModel
    config: EngineConfig
    _intake: Intake
    _runner: ModelRunner
    _inboxes: dict[str, deque[RequestOutput]]

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        """Queue a request."""
        raise NotImplementedError

    def add_branches(self, *args: Any, **kwargs: Any) -> list[str]:
        """Queue all answers to one prompt."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """End a request."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Run one dispatch on device."""
        raise NotImplementedError

    def _is_live(self, request_id: str) -> bool:
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Answer prompts together and return when all are done, in their order.

        Several answers to a prompt come one after the other in its place.

        Args:
            prompts: one prompt or several.
            params: one for all, or one for each.
            adapter: the name of a loaded adapter for all, or for each a name or None.
            priority: as of `add_request`, for all or for each.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be served; none has started.
        """
        many = [prompts] if _is_one_prompt(prompts) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if adapter is None or isinstance(adapter, str):
            adapter = [adapter] * len(many)
        if isinstance(priority, int):
            priority = [priority] * len(many)
        if not len(each) == len(adapter) == len(priority) == len(many):
            raise ValueError(
                f"{len(each)} sampling params, {len(adapter)} adapters and {len(priority)} "
                f"priorities for {len(many)} prompts"
            )
        each = [own or SamplingParams() for own in each]
        groups: list[list[str]] = []
        try:
            for prompt, own, name, value in zip(many, each, adapter, priority, strict=True):
                groups.append(self.add_branches(prompt, own, adapter=name, priority=value))
            answers = iter(self.collect([request_id for group in groups for request_id in group]))
        finally:
            for request_id in [request_id for group in groups for request_id in group]:
                self.cancel(request_id)
        return [
            answer
            for group, own in zip(groups, each, strict=True)
            for answer in best([next(answers) for _ in group], own)
        ]

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams | None = None, **options: Any
    ) -> list[Completion]:
        """The likeliest answers to a prompt that a beam search finds, the best first.

        Args:
            prompt: text, or token ids.
            params: how to search.
            **options: as of `add_request`: `cache_salt` and `adapter`.

        Raises:
            InvalidRequest: it can never be served; nothing has changed.
        """
        ids = self.add_branches(prompt, params or BeamSearchParams(), **options)
        return self.collect(ids)

    def collect(self, request_ids: Sequence[str]) -> list[Completion]:
        """Run until requests that have just been added are done; returns their whole answers."""
        inboxes = {request_id: deque() for request_id in request_ids}
        self._inboxes |= inboxes
        try:
            while any(self._is_live(request_id) for request_id in inboxes):
                self._pump()
        finally:
            for request_id in inboxes:
                self._leave(request_id)
        return [Completion.of(inboxes[request_id]) for request_id in request_ids]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        priority: int = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, yielding text as it comes; leaving the loop cancels the request."""
        yield from self.follow(
            self.add_request(
                prompt, params, cache_salt=cache_salt, adapter=adapter, priority=priority
            )
        )

    def follow(self, request_id: str) -> Generator[RequestOutput, None, None]:
        """The outputs of a request that has just been added, as `stream` yields them."""
        inbox = self._inboxes[request_id] = deque()
        try:
            while inbox or self._is_live(request_id):
                while inbox:
                    yield inbox.popleft()
                if self._is_live(request_id):
                    self._pump()
        finally:
            self._leave(request_id)

    def sequence(
        self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None
    ) -> Branch:
        """A sequence that can be continued, forked and continued again.

        Raises:
            InvalidRequest: the prompt can never be served.
        """
        return Branch(
            self, self._intake, self._runner, prompt, cache_salt=cache_salt, adapter=adapter
        )

    def _pump(self) -> list[RequestOutput]:
        """Run a step, put what came of it where it is collected, and return what nobody does."""
        others = []
        for output in self.step():
            self._inboxes.get(output.request_id, others).append(output)
        return others

    def _leave(self, request_id: str) -> None:
        self.cancel(request_id)
        del self._inboxes[request_id]


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
