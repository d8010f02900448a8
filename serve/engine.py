"""The engine: continuous batching over a paged cache that never computes a prefix twice.

A request's life: `add_request` checks it and queues it; `step` admits it (matching its prompt
against the cache), prefills what missed in chunks beside everybody's decode, publishes every
block that fills, decodes in loops on device, and gives back its blocks when it ends. Blocks are
held only by running requests, which give them back in `_retire` when they end and in `_preempt`
when they must wait again.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..models import LoadedModel, load_model
from ..paged import OutOfBlocks
from .adapter_control import AdapterControl
from .beams import BeamSearches
from .branching import Join, Work, joined_work, joins
from .config import EngineConfig
from .deadlines import Deadlines
from .decode_loops import DecodeLoops, schedules_ahead
from .determinism import with_determinism
from .explain_compile import ProgramReport, explain_programs
from .grammars import Grammars
from .intake import Intake
from .kept_programs import keep_compiled_programs
from .lifecycle import Lifecycle
from .logprobs import report
from .outputs import COUNTERS, EngineStats, RequestOutput
from .programs import Drawn
from .request import Request
from .request_control import RequestControl
from .restore_choice import choice_for
from .restores import Restores
from .runner import ModelRunner
from .scheduler import Scheduler
from .warmup import compile_all

# Finish reasons that the last step has not published blocks for, and where they are counted.
_ENDED_FROM_OUTSIDE = {"cancelled": "num_cancelled", "timeout": "num_timed_out"}


class Engine(RequestControl, Lifecycle, AdapterControl):
    """Generates text for many requests at once. Synchronous; one thread at a time.

    Streams may be read in turns. A request of `add_request` gets its outputs from the `step` calls
    of whoever added it.

    Args:
        loaded: model, tokenizer and chat template, from `octavo.models.load_model`. On a CPU the
            weights are copied (`Llama.packed`); what was given can be let go of.
        config: see `EngineConfig`.

    Raises:
        ValueError: model and configuration do not fit together.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None):
        self.config = config = with_determinism(config or EngineConfig(), loaded)
        loaded = replace(loaded, model=loaded.model.packed())
        store = keep_compiled_programs(config, loaded.model)
        runner = ModelRunner(loaded.model, config)
        runner.keep_programs_in(store)
        intake = Intake(loaded, runner.layout, config.block_size, runner.adapters)
        super().__init__(loaded, runner, intake)
        self._scheduler = Scheduler(
            policy=config.scheduling_policy,
            max_setbacks=config.max_setbacks,
            num_seats=config.max_num_seqs,
            num_blocks=runner.num_unpinned_blocks,
            block_size=config.block_size,
            token_budget=config.max_num_batched_tokens,
            share=config.enable_prefix_caching,
            cached_lens_fn=runner.cached_lens,
            most_matched=runner.prefix_lens.num_requests,
        )
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._loops = DecodeLoops(
            runner,
            slice_ms=config.decode_slice_ms,
            max_steps=config.max_decode_steps,
            ahead=schedules_ahead(config),
        )
        self._count = dict.fromkeys(COUNTERS, 0)
        choice = choice_for(loaded.model, config, runner.layout)
        if runner.tiers is not None:
            below = runner.tiers.keeps_all_of(runner.layout.shape[0] - 1)
            if below is not None:
                runner.limit_block_cost(choice.cost_of_restoring(below))
        self._restores = Restores(
            runner,
            block_size=config.block_size,
            slice_s=config.decode_slice_ms / 1000,
            count=self._count,
            choice=choice,
        )
        # Without a cycle: an engine that is let go of gives back its memory at once.
        own = weakref.proxy(self)
        self._beams = BeamSearches(
            runner,
            intake,
            config,
            restores=self._restores,
            count=self._count,
            scheduler=self._scheduler,
            text_fn=lambda prompt, more: own.loaded.tokenizer.decode_after(prompt, more),
            preempt_fn=lambda number: own._preempt_younger(number),
        )

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        quantization: str | None = None,
        progress: Callable[[int, int, str], None] | None = None,
        **config: object,
    ) -> Engine:
        """Load a model by name or path and set up an engine; keywords are `EngineConfig`'s.

        Args:
            name: a name that `octavo.models.load_model` knows, a directory or a GGUF file.
            quantization: None, "int8" or "w8a8", as `load_model` takes it.
            progress: called with (done, total, what) while loading.
            **config: fields of `EngineConfig`.
        """
        settings = EngineConfig(**config)  # pyright: ignore[reportArgumentType]
        loaded = load_model(name, quantization=quantization, progress=progress)
        return cls(loaded, settings)

    @property
    def grammars(self) -> Grammars:
        """What compiles the grammars of structured outputs; other threads may use it too."""
        return self._intake.grammars

    @property
    def max_model_len(self) -> int:
        """Longest context that a request can reach, in tokens."""
        return self._runner.layout.max_model_len

    # ---- steps -----------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Wait for one dispatch on device; returns what each request gained by it."""
        done = self._end_late()
        if self._loops.in_flight:
            advanced = self._land()
        else:
            done += self._beams.step(len(self._scheduler.running))
            self._admit_waiting()
            self._restore()
            computing = self._scheduler.computing
            if not computing:
                self._check_progress(done)
                return done
            prefill = any(request.needs_prefill for request in computing)
            advanced = self._packed_step() if prefill else self._decode()
        for request in advanced:
            if request.finish_reason is not None:
                self._retire(request)
        return done + [request.take_output() for request in advanced]

    def _check_progress(self, done: Sequence[RequestOutput]) -> None:
        if self._scheduler.running or self._beams.num_running or done or not self.num_unfinished:
            return
        raise OutOfBlocks("no request runs and yet the next one finds no blocks")

    def _end_late(self) -> list[RequestOutput]:
        """End the requests whose time is over."""
        late = self._deadlines.passed()
        for request in late:
            request.end("timeout")
            self._retire(request)
        return [request.take_output() for request in late]

    def _admit_waiting(self) -> None:
        for i, request in enumerate(self._scheduler.candidates()):
            # Whoever starts is not to be preempted at once, before it has computed anything.
            if (i == 0 and not self._reserve(1)) or self._beams.holds_back(request.number):
                return
            while (cached := self._admit(request)) is None:
                victim = self._scheduler.victim_for(request)
                if victim is None:
                    return self._scheduler.refuse()
                self._preempt(victim)
            request.num_published = cached // self.config.block_size
            request.num_computed = cached
            is_first = request.num_cached_tokens is None
            if is_first:
                request.num_cached_tokens = request.num_computed
                self._count["prompt_tokens"] += request.num_prompt_tokens
                if not request.scores_prompt:
                    self._count["prefix_query_tokens"] += request.num_prompt_tokens
                self._count["prefix_hit_tokens"] += request.num_computed
            self._restores.begin(request, is_first=is_first)

    def _admit(self, request: Request) -> int | None:
        """Start a request; returns its cached tokens, or None if there is no seat or no room."""
        seat = self._scheduler.next_seat()
        if seat is None:
            return None
        try:
            self._acting(request)
            cached = self._runner.admit(request, seat)
            if cached is not None:
                self._scheduler.start(request)
        except BaseException:
            # An interrupt while the host waits for the device: the seat has its blocks already,
            # and nobody would know.
            if request.seat is None:
                self._runner.release_seat(seat)
            raise
        return cached

    def _restore(self) -> None:
        """Take what lower tiers have read; wait for it if there is nothing else to do."""
        idle = not self._scheduler.computing and not self._beams.num_running
        self._restores.advance(
            self._scheduler.running, lambda request: self._publish([request], ()), idle=idle
        )

    def _packed_step(self) -> list[Request]:
        self._make_room(1)
        work = self._scheduler.prefill_work()
        if not work:
            return []
        joining = self._join(work)
        work = joined_work(work, joining)
        prefilling = [request.needs_prefill for request, _ in work]
        num_programs, begin = self.num_programs, time.perf_counter()
        drawn = self._runner.packed(work)
        if len(work) == 1 and self.num_programs == num_programs:
            (request, count), seconds = work[0], time.perf_counter() - begin
            start = request.num_computed
            self._restores.choice.computed(start, start + count, seconds)
        for join in joining:
            join.branch.num_computed = join.branch.num_prompt_tokens
            join.branch.prompt_logprobs = list(join.leader.prompt_logprobs)
        advanced, tails = [], []
        for row, ((request, count), prefill) in enumerate(zip(work, prefilling, strict=True)):
            request.num_computed += count
            self._count["prefilled_tokens"] += count if prefill else 0
            if request.num_computed == request.num_tokens:
                self._take_tokens(request, drawn, row)
                advanced.append(request)
                if count and (prefill or request.finish_reason is not None):
                    tails.append(request)
        self._publish([request for request, count in work if count], tails)
        for join in joining:
            join.branch.num_published = join.leader.num_published
        return advanced

    def _join(self, work: Work) -> list[Join]:
        """Seat the branches of prompts that this step completes, as far as there are seats."""
        joining = []
        for join in joins(work):
            if not self._scheduler.may_join(join.branch):
                break
            self._scheduler.start(join.branch)
            joining.append(join)
            join.branch.num_cached_tokens = join.leader.num_cached_tokens
        if joining:
            self._runner.fork([(join.leader, join.branch) for join in joining])
        return joining

    def _decode(self) -> list[Request]:
        num_steps = self._loops.num_steps(len(self._scheduler.computing))
        if any(request.grammar is not None for request in self._scheduler.computing):
            num_steps = 1  # the host follows the grammars
        # A shorter loop that fits is better than a preemption.
        while num_steps > 1 and not self._reserve(num_steps):
            num_steps //= 2
        self._make_room(num_steps)
        running = self._scheduler.computing
        if not running:  # all have made room for a beam search
            return []
        self._loops.start(running, num_steps)
        return self._land()

    def _land(self) -> list[Request]:
        """Take the tokens of the first decode loop in flight."""
        others = self._scheduler.someone_may_start or len(self._beams)
        with self._loops.landing(() if others else self._scheduler.running) as (requests, drawn):
            advanced = []
            for row, request in enumerate(requests):
                # The newest token's keys and values are written by the step that follows it.
                if taken := self._take_tokens(request, drawn, row):
                    request.num_computed += taken
                    advanced.append(request)
            self._publish(advanced, [r for r in advanced if r.finish_reason is not None])
        return advanced

    def _take_tokens(self, request: Request, drawn: Drawn, row: int) -> int:
        """Append what was drawn in a row up to the request's end; returns how many were taken."""
        wanted, taken = request.params.logprobs, 0
        for step, token in enumerate(drawn.tokens[:, row].tolist()):
            if token < 0 or request.finish_reason is not None:
                break
            logprobs = None
            if wanted is not None:
                logprobs = report(drawn.logprobs, (step, row), token, wanted)
            request.add_token(token, logprobs)
            taken += 1
        self._count["generated_tokens"] += taken
        return taken

    def _publish(self, requests: Sequence[Request], tails: Sequence[Request]) -> None:
        """Share what has been computed; of `tails` the last, unfilled block as well."""
        if self.config.enable_prefix_caching:
            self._runner.publish(requests, tails)

    def _make_room(self, more: int) -> None:
        """Give every decoding request room for `more` tokens, preempting others if need be.

        The first in turn always finds it: alone it fits the pool, as `add_request` checked.
        """
        while not self._reserve(more):
            victim = self._scheduler.victim()
            if self._beams.give_way(victim.number):
                continue
            if len(self._scheduler.running) == 1 and not self._beams.num_running:
                raise OutOfBlocks("a request that runs alone must fit the pool, and does not")
            self._preempt(victim)

    def _preempt_younger(self, number: int) -> bool:
        """Make room by the request whose turn it is least, if it came after that number."""
        younger = bool(self._scheduler.running) and self._scheduler.victim().number > number
        if younger:
            self._preempt(self._scheduler.victim())
        return younger

    def _reserve(self, more: int) -> bool:
        self._acting(None)
        decoding = [r for r in self._scheduler.running if not r.needs_prefill]
        return self._runner.reserve(decoding, more)

    def _preempt(self, request: Request) -> None:
        self._restores.end(request)
        # Its blocks stay cached, so that resuming finds what has not been evicted meanwhile.
        self._publish([request], [request])
        self._runner.release(request)
        self._scheduler.preempt(request)
        request.num_computed = request.num_published = 0
        self._count["num_preemptions"] += 1

    def _retire(self, request: Request) -> None:
        count = _ENDED_FROM_OUTSIDE.get(request.finish_reason or "")
        self._restores.end(request)
        if request.seat is not None:
            if count is not None:
                self._publish([request], [request])
            if request.hold is not None:
                self._runner.keep(request, request.hold)
            self._runner.release(request)
        self._scheduler.end(request)
        self._deadlines.remove(request)
        del self._requests[request.request_id]
        self._count[count or "num_finished"] += 1

    # ---- state -----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Where the engine stands; reads three counters from the device."""
        blocks = self._runner.stats()
        return EngineStats(
            num_running=len(self._scheduler.running) + self._beams.num_running,
            num_waiting=self.num_waiting,
            num_blocks=self._runner.layout.shape[0] - 1,
            num_free_blocks=int(blocks.num_free),
            num_cached_blocks=int(blocks.num_cached),
            num_active_blocks=int(blocks.num_active),
            num_draft_tokens=self._runner.num_draft_tokens,
            num_accepted_tokens=self._runner.num_accepted_tokens,
            restores=self._restores.choice.stats,
            tiers={} if self._runner.tiers is None else self._runner.tiers.stack.stats(),
            **self._count,
        )

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile or load every program, several at once, so that no request waits for one.

        Args:
            progress: called with (done, total, what) at the start and after each program.

        Returns:
            The number of programs.
        """
        return compile_all(self._runner.warmups(), progress or (lambda *_: None))

    def explain_compile(self) -> Iterator[ProgramReport]:
        """Compile every program, one after the other, and say what each is for."""
        return explain_programs(self._runner.warmups(), lambda: self._runner.num_loaded)

    @property
    def num_programs(self) -> int:
        """Programs compiled or loaded so far; never more than `warmup` returns."""
        return self._runner.num_programs
