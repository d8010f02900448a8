"""What users do with an engine's requests: add, branch, cancel, count."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from .answers import Answers
from .beam_search import BeamSearchParams
from .beams import BeamSearches
from .branching import branch_params
from .deadlines import Deadlines
from .held import Hold
from .intake import Prompt
from .outputs import RequestOutput
from .refusals import EngineDraining
from .request import Request
from .sampling_params import InvalidRequest, SamplingParams
from .scheduler import Scheduler, check_priority


class RequestControl(Answers):
    """An engine's requests from when they are added until they end."""

    _requests: dict[str, Request]
    _beams: BeamSearches
    _deadlines: Deadlines
    _scheduler: Scheduler
    _draining: bool

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str | None = None,
        request_id: str | None = None,
        hold: Hold | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            cache_salt: only requests with the same salt share blocks.
            priority: lower values run first, under the scheduling policy `priority`.
            adapter: the name of a loaded adapter, None for the model alone.
            request_id: its name; None makes one.
            hold: keeps its blocks when it ends.

        Returns:
            The request's id.

        Raises:
            InvalidRequest: the request can never be served; nothing has changed.
            EngineDraining: no requests are taken any more.
        """
        self._must_take_requests()
        params = params or SamplingParams()
        if params.num_branches != 1:
            raise InvalidRequest(
                f"n={params.num_branches} answers need add_branches or generate", param="n"
            )
        request_id = request_id or secrets.token_hex(8)
        if self._is_live(request_id):
            raise InvalidRequest(f"{request_id=} is in use", param="request_id")
        check_priority(priority, self.config.scheduling_policy)
        request = self._intake.request(prompt, params, cache_salt, request_id, adapter)
        request.priority = priority
        request.hold = hold
        self._requests[request_id] = request
        self._scheduler.add(request)
        self._deadlines.add(request)
        return request_id

    def add_branches(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        request_ids: Sequence[str] | None = None,
        **options: Any,
    ) -> list[str]:
        """Queue all answers to one prompt, which they share: a request each.

        Args:
            prompt: text, or token ids.
            params: of all; sample i takes the seed `seed + i`. Those of a beam search come
                together when it is over, the best first.
            request_ids: their names; None makes some.
            **options: as of `add_request`.

        Returns:
            The requests' ids.

        Raises:
            InvalidRequest: they can never be served; nothing has changed.
        """
        ids = list(request_ids or [secrets.token_hex(8) for _ in range(params.num_branches)])
        if isinstance(params, BeamSearchParams):
            self._must_take_requests()
            used = [request_id for request_id in ids if self._is_live(request_id)]
            if used or len(set(ids)) < len(ids):
                raise InvalidRequest(f"request_ids={ids} are in use", param="request_id")
            self._beams.add(prompt, params, ids, **options)
            return ids
        each = branch_params(params)
        tokens = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        added: list[str] = []
        try:
            for request_id, own in zip(ids, each, strict=True):
                added.append(self.add_request(tokens, own, request_id=request_id, **options))
        except BaseException:
            for request_id in added:
                self.cancel(request_id)
            raise
        branches = [self._requests[request_id] for request_id in added]
        for request in branches:
            request.branches = branches
        return added

    def cancel(self, request_id: str) -> bool:
        """End a request now and give back its blocks; False if it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return self._beams.cancel(request_id)
        self._cancelled(request)
        return True

    def _must_take_requests(self) -> None:
        if self._draining:
            raise EngineDraining("no requests are taken: the engine was drained, and not resumed")

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._beams

    def _cancelled(self, request: Request) -> RequestOutput:
        request.finish_reason = "cancelled"
        self._retire(request)
        return request.take_output()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests) + len(self._beams)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for the first time or again."""
        return len(self._scheduler.waiting) + len(self._beams) - self._beams.num_running

    def _retire(self, request: Request) -> None:
        raise NotImplementedError
