"""Beam searches on the engine: forks, copies on write and releases of rows, one dispatch a step.

The beams of a search are as long as one another and sit in spare rows of the block tables, so they
take no seat. A step decodes all of them at once. Then the rows of beams that died are given back
and taken by those that split, which share all blocks with the beam that they continue; the next
write to a shared block copies it.

Searches and requests make room for one another by age: whoever came later gives way, and what came
after a search that waits does not start before it. A search that starts sets back the requests that
came before it and wait, and does not start before one that is overdue (see `scheduler`). One that
gives way leaves its blocks in the cache. It goes on from them, or if some are gone it starts again;
it finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .beam_search import Beam, BeamSearchParams, BeamSelection, num_candidates
from .config import EngineConfig
from .intake import Intake, Prompt
from .outputs import RequestOutput
from .request import Request
from .restores import Restores
from .runner import ModelRunner
from .sampling_params import InvalidRequest, SamplingParams
from .scheduler import Scheduler


@dataclass(kw_only=True, eq=False)
class BeamSearch:
    """One search.

    Attributes:
        prompt: the prompt as a request; never run itself.
        request_ids: of its answers, the best first; those that are cancelled become None.
        selection: who runs and who has finished.
        beams: the running beams as requests, as in `selection`.
        rows: what they sit in; empty while the search waits.
    """

    prompt: Request
    params: BeamSearchParams
    request_ids: list[str | None]
    selection: BeamSelection = field(init=False)
    beams: list[Request] = field(init=False)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Go back to the prompt."""
        self.selection = BeamSelection(self.params, self.prompt.stop_ids)
        self.beams = [_continued(self.prompt, ())]

    def most_blocks(self, block_size: int) -> int:
        """Blocks that it needs at most."""
        whole, tail = divmod(self.prompt.num_prompt_tokens, block_size)
        own = -(-(tail + self.params.max_tokens - 1) // block_size)
        return whole + self.params.beam_width * own


class BeamSearches:
    """The beam searches of an engine, oldest first.

    Args:
        runner: the device's side.
        intake: checks what comes in.
        config: the engine's.
        restores: gets what lower tiers hold of a prompt.
        count: the engine's counters.
        scheduler: the requests that searches run beside.
        text_fn: what tokens add to the text of a prompt.
        preempt_fn: makes a running request give way that came after the given number, if any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        intake: Intake,
        config: EngineConfig,
        restores: Restores,
        count: dict[str, int],
        scheduler: Scheduler,
        text_fn: Callable[[Sequence[int], Sequence[int]], str],
        preempt_fn: Callable[[int], bool],
    ):
        self._runner = runner
        self._intake = intake
        self._config = config
        self._restores = restores
        self._count = count
        self._scheduler = scheduler
        self._text_fn = text_fn
        self._preempt_fn = preempt_fn
        self._searches: list[BeamSearch] = []
        # Requests that ran when there was no room: until one of them, or a search, ends there will
        # be none.
        self._crowd: int | None = None

    def __len__(self) -> int:
        return len(self._searches)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in search.request_ids for search in self._searches)

    @property
    def prompts(self) -> list[Request]:
        """The prompts of all searches, waiting or running."""
        return [search.prompt for search in self._searches]

    @property
    def num_running(self) -> int:
        """Searches that have rows; the others wait."""
        return sum(bool(search.rows) for search in self._searches)

    def add(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_ids: Sequence[str],
        *,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str | None = None,
    ) -> None:
        """Queue a search.

        Raises:
            InvalidRequest: it can never be served; nothing has changed.
        """
        if priority:
            raise InvalidRequest("a beam search has no priority", param="priority")
        sampling = SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        request = self._intake.request(prompt, sampling, cache_salt, request_ids[0], adapter)
        count = num_candidates(params, request.stop_ids)
        request.params = replace(sampling, logprobs=count)
        self._queue(request, params, request_ids)

    def _queue(self, prompt: Request, params: BeamSearchParams, request_ids: Sequence[str]) -> None:
        search = BeamSearch(prompt=prompt, params=params, request_ids=list(request_ids))
        if params.beam_width > self._config.max_num_seqs:
            raise InvalidRequest(
                f"beam_width={params.beam_width} must be at most "
                f"max_num_seqs={self._config.max_num_seqs}",
                param="beam_width",
            )
        needed = search.most_blocks(self._config.block_size)
        most = self._runner.num_unpinned_blocks
        if needed > most:
            raise InvalidRequest(
                f"beam_width={params.beam_width} with max_tokens={params.max_tokens} needs up to "
                f"{needed} blocks of the KV cache, which has {most}: it can never fit",
                param="beam_width",
            )
        self._searches.append(search)

    def cancel(self, request_id: str) -> bool:
        """Give up an answer, and the search with the last one; False if it is not here."""
        for search in self._searches:
            if request_id in search.request_ids:
                search.request_ids[search.request_ids.index(request_id)] = None
                self._count["num_cancelled"] += 1
                if not any(search.request_ids):
                    self._end(search, publish=False)
                return True
        return False

    def holds_back(self, number: int) -> bool:
        """Whether the request of this number must not start: a search waits that came before."""
        return any(not s.rows and s.prompt.number < number for s in self._searches)

    def give_way(self, number: int) -> bool:
        """Let the youngest running search give way if it came after the given number."""
        running = [search for search in self._searches if search.rows]
        if not running or running[-1].prompt.number < number:
            return False
        self._leave(running[-1])
        return True

    def step(self, num_running: int) -> list[RequestOutput]:
        """Run a dispatch for each search; returns the answers of those that are done.

        Args:
            num_running: requests that run beside them.
        """
        outputs = []
        for search in list(self._searches):
            if not search.rows and not self._enter(search, num_running):
                break
            outputs += self._advance(search, num_running)
        return outputs

    # ---- coming and going ----------------------------------------------------------------------

    def _enter(self, search: BeamSearch, num_running: int) -> bool:
        if self._crowd is not None and num_running >= self._crowd > 0:
            return False
        if not self._scheduler.may_pass(search.prompt.number):
            return False
        self._crowd = None
        # Beams whose blocks are not all cached would be computed one by one, and share nothing.
        if len(search.beams) > 1 and not self._take_rows(search):
            search.restart()
        if not search.rows and not self._take_rows(search):
            self._crowd = num_running
            return False
        self._scheduler.set_back(search.prompt.number)
        return True

    def _take_rows(self, search: BeamSearch) -> bool:
        rows = self._runner.spare_rows.take(search.params.beam_width)
        if rows is None:
            return False
        search.rows = rows
        try:
            for beam, row in zip(search.beams, rows, strict=False):
                cached = self._runner.admit(beam, row)
                alone = len(search.beams) == 1
                if cached is None or not (alone or cached == beam.num_tokens - 1):
                    self._leave(search, publish=False)
                    return False
                beam.seat, beam.num_computed = row, cached
                beam.num_published = cached // self._config.block_size
                is_first = search.prompt.num_cached_tokens is None
                self._note_cached(search.prompt, beam, cached)
                if alone:
                    self._restores.begin(beam, is_first=is_first, may_split=False)
        except BaseException:
            self._leave(search, publish=False)
            raise
        return True

    def _note_cached(self, prompt: Request, beam: Request, cached: int) -> None:
        if prompt.num_cached_tokens is None:
            prompt.num_cached_tokens = cached
            self._count["prompt_tokens"] += prompt.num_prompt_tokens
            self._count["prefix_query_tokens"] += prompt.num_prompt_tokens
            self._count["prefix_hit_tokens"] += cached
        # Coming back is not looked up again.
        beam.num_cached_tokens = prompt.num_cached_tokens

    def _leave(self, search: BeamSearch, *, publish: bool = True) -> None:
        """Give back all rows; what has been computed stays cached."""
        if publish and self._config.enable_prefix_caching:
            self._runner.publish(search.beams, search.beams)
        rows, search.rows = search.rows, []
        self._runner.spare_rows.give_back(rows)
        for beam in search.beams:
            self._restores.end(beam)
            beam.seat, beam.shares_tail = None, False
            beam.num_computed = beam.num_published = 0

    def _end(self, search: BeamSearch, *, publish: bool = True) -> None:
        if search.rows:
            self._leave(search, publish=publish)
            self._crowd = None
        self._searches.remove(search)

    # ---- a step --------------------------------------------------------------------------------

    def _advance(self, search: BeamSearch, num_running: int) -> list[RequestOutput]:
        first = search.beams[0]
        if first.restore is not None:
            self._restores.advance(
                [first], lambda beam: self._runner.publish([beam]), idle=num_running == 0
            )
            search.prompt.num_cached_tokens = first.num_cached_tokens
            if first.restore is not None:
                return []
        missing = first.num_tokens - 1 - first.num_computed
        if missing:
            # Only the prompt is ever computed like this, and by the last token's decode step.
            count = min(missing, self._config.max_num_batched_tokens)
            self._runner.packed([(first, count)])
            first.num_computed += count
            self._count["prefilled_tokens"] += count
            if self._config.enable_prefix_caching:
                self._runner.publish([first])
            return []
        while not self._runner.reserve(search.beams, 1):
            if self._preempt_fn(search.prompt.number):
                continue
            if not self.give_way(search.prompt.number):
                return []
            if not search.rows:
                self._crowd = num_running
                return []
        try:
            return self._decode(search)
        except BaseException:
            # An interrupt while the host waits for the device: who sits where is not sure.
            if search in self._searches:
                self._leave(search, publish=False)
                search.restart()
            raise

    def _decode(self, search: BeamSearch) -> list[RequestOutput]:
        drawn = self._runner.decode_once(search.beams).logprobs
        for beam in search.beams:
            beam.num_computed += 1
        wanted = search.prompt.params.logprobs
        likeliest = [
            [
                (token, logprob)
                for token, logprob in zip(
                    drawn.top_ids[0, row, :wanted].tolist(),
                    drawn.top_logprobs[0, row, :wanted].tolist(),
                    strict=True,
                )
                if token >= 0
            ]
            for row in range(len(search.beams))
        ]
        parents = search.selection.advance(likeliest)
        if search.selection.done:
            self._end(search)
            return self._answers(search)
        self._regroup(search, parents)
        return []

    def _regroup(self, search: BeamSearch, parents: Sequence[int]) -> None:
        """Give each beam a row with the blocks of its parent: that one's own, or a fork."""
        beams = []
        for beam, parent in zip(search.selection.running, parents, strict=True):
            child = _continued(search.prompt, beam.tokens)
            before = search.beams[parent]
            child.num_computed, child.num_published = before.num_computed, before.num_published
            child.num_cached_tokens = before.num_cached_tokens
            child.shares_tail = before.shares_tail
            beams.append(child)
        free = set(search.rows)
        for child, parent in zip(beams, parents, strict=True):
            row = search.beams[parent].seat
            if row in free:
                free.remove(row)
                child.seat = row
        forks = []
        for child, parent in zip(beams, parents, strict=True):
            if child.seat is None:
                child.seat = free.pop()
                forks.append((search.beams[parent], child))
        keepers = {beam.seat: beam for beam in beams}
        if forks:
            self._runner.fork([(keepers[parent.seat], child) for parent, child in forks])
        for row in free:
            self._runner.release_seat(row)
        search.beams = beams

    def _answers(self, search: BeamSearch) -> list[RequestOutput]:
        best = [*search.selection.finished, *search.selection.running]
        outputs = [
            self._output(search.prompt, request_id, beam)
            for request_id, beam in zip(search.request_ids, best, strict=False)
            if request_id is not None
        ]
        self._count["num_finished"] += len(outputs)
        self._count["generated_tokens"] += sum(o.num_generated_tokens for o in outputs)
        return outputs

    def _output(self, prompt: Request, request_id: str, beam: Beam) -> RequestOutput:
        stopped = beam.tokens[-1] in prompt.stop_ids
        own = beam.tokens[:-1] if stopped else beam.tokens
        text = self._text_fn(prompt.tokens[: prompt.num_prompt_tokens].tolist(), own)
        return RequestOutput(
            request_id=request_id,
            text=text,
            token_ids=beam.tokens,
            finish_reason="stop" if stopped else "length",
            num_prompt_tokens=prompt.num_prompt_tokens,
            num_cached_tokens=prompt.num_cached_tokens or 0,
            num_generated_tokens=len(beam.tokens),
            score=beam.score,
        )


def _continued(prompt: Request, tokens: Sequence[int]) -> Request:
    """The prompt as a request of its own that has generated `tokens`."""
    buffer = prompt.tokens.copy()
    num_tokens = prompt.num_prompt_tokens + len(tokens)
    buffer[prompt.num_prompt_tokens : num_tokens] = np.asarray(tokens, np.int32)
    return replace(prompt, tokens=buffer, num_tokens=num_tokens)
