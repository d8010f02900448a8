"""The device's side of the engine: the model's steps, on the blocks that `BlockRunner` gives out.

As there, everything on device is donated from call to call, and of a step the host reads back only
what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from ..models import Llama
from .adapters import Adapters
from .block_runner import BlockRunner
from .config import EngineConfig
from .layout import CacheLayout
from .program import Program
from .program_store import ProgramStore
from .programs import DecodeRows, Drawn, ModelSteps, bucket_for, buckets
from .prompt_logprobs import record
from .request import Request
from .rows import decode_rows, draws_after, packed_rows
from .speculation import may_propose
from .token_masks import TokenMasks, masks_of, no_masks

_SMALLEST_STEP = 16
_READY = np.bool_(True)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeLoop:
    """A decode loop that has been dispatched.

    Attributes:
        requests: its rows.
        num_steps: tokens that each draws, at most.
        drawn: on device.
        after: the rows of a loop that goes on; None if the host must see the tokens first.
        lens: what each request has computed when it is over, at most.
        checked: `int32[2]` guesses made and taken, of one with speculation.
    """

    requests: Sequence[Request]
    num_steps: int
    drawn: Drawn
    after: DecodeRows | None
    lens: Sequence[int]
    checked: jax.Array | None = None


class ModelRunner(BlockRunner):
    """Runs steps on device for requests that the scheduler chose.

    Attributes:
        adapters: those in slots.
        num_draft_tokens, num_accepted_tokens: guesses made and guesses taken so far.
    """

    def __init__(self, model: Llama, config: EngineConfig):
        super().__init__(model.config, config, CacheLayout.of(model.config, config, model.dtype))
        self.adapters = Adapters(
            model.config,
            num_slots=config.max_loras,
            rank=config.max_lora_rank,
            dtype=model.dtype,
        )
        self._steps = ModelSteps(
            model,
            self.adapters.stack,
            block_size=config.block_size,
            max_decode_steps=config.max_decode_steps,
            cascade=config.enable_cascade_attention,
            num_drafts=config.num_speculative_tokens,
            deterministic=bool(config.deterministic),
        )
        self._token_buckets = buckets(_SMALLEST_STEP, config.max_num_batched_tokens)
        self._row_buckets = buckets(1, config.max_num_seqs)
        most = config.max_speculative_seqs if config.num_speculative_tokens else 0
        self._speculative_buckets = tuple(size for size in self._row_buckets if size <= most)
        self.num_draft_tokens = self.num_accepted_tokens = 0
        # On device once: steps without constraints send nothing.
        self._vocab_size = model.config.vocab_size
        row_counts = {*self._row_buckets, *map(self._step_rows, self._token_buckets)}
        self._no_masks = {
            n: jax.device_put(no_masks(n, self._vocab_size)) for n in sorted(row_counts)
        }

    # ---- model -----------------------------------------------------------------------------

    def check_weights(self, model: Llama) -> None:
        """Raise `ValueError` if these weights are not of the same architecture."""
        self._steps.weights_of(model)

    def load_weights(self, model: Llama) -> None:
        """Compute with these weights from now on.

        Raises:
            ValueError: they are not of the same architecture.
        """
        self._steps.weights = self._steps.weights_of(model)

    def packed(self, work: Sequence[tuple[Request, int]]) -> Drawn:
        """Compute the next `count` tokens of each (request, count); returns next tokens `[1, R]`.

        What a request draws whose tokens are not all computed means nothing.
        """
        # There are no more rows than tokens.
        size = bucket_for(max(sum(count for _, count in work), len(work)), self._token_buckets)
        tokens, rows = packed_rows(work, size, self._step_rows(size))
        drawing = [request if draws_after(request, count) else None for request, count in work]
        masks = self._masks(drawing, self._step_rows(size))
        drawn, scores, self._kv_cache, self._history = self._steps.packed(
            size, *self._step_args(), tokens, rows, masks
        )
        if any(request.scores_prompt for request, _ in work):
            record(work, jax.device_get(scores))
        return _fetch(drawn, [request for request, _ in work])

    def decode(self, requests: Sequence[Request], num_steps: int) -> DecodeLoop:
        """Let the device generate up to `num_steps` tokens per request.

        Where guessing is on, a sequence ends with what it has held before, and few enough
        decode, none of them by a grammar, it is done with speculation.
        """
        size = bucket_for(len(requests), self._row_buckets)
        lens = [request.num_computed + num_steps for request in requests]
        loop = partial(DecodeLoop, requests=requests, num_steps=num_steps, lens=lens)
        guided = any(request.grammar is not None for request in requests)
        guesses = size in self._speculative_buckets
        if (
            guesses
            and not guided
            and any(may_propose(request.tokens[: request.num_tokens]) for request in requests)
        ):
            drawn, checked, self._kv_cache, self._history = self._steps.speculate(
                size, *self._step_args(), decode_rows(requests, size, num_steps)
            )
            return loop(drawn=drawn, after=None, checked=checked)
        drawn, after = self._decode(requests, decode_rows(requests, size), num_steps)
        return loop(drawn=drawn, after=None if guided or guesses else after)

    def decode_behind(self, loop: DecodeLoop) -> DecodeLoop:
        """Let the device go on where a loop of it ends, if there are blocks by then."""
        assert loop.after is not None
        lens = [n + loop.num_steps for n in loop.lens]
        ready = self.grow(loop.requests, lens)
        drawn, after = self._decode(loop.requests, loop.after, loop.num_steps, ready)
        return replace(loop, drawn=drawn, after=after, lens=lens)

    def fetch(self, loop: DecodeLoop) -> Drawn:
        """What a loop drew, `[steps, R]`, on the host."""
        if loop.checked is not None:
            num_drafts, num_accepted = np.asarray(loop.checked).tolist()
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
        return _fetch(loop.drawn, loop.requests)

    def decode_once(self, requests: Sequence[Request]) -> Drawn:
        """Generate one token per request, without guessing; returns them `[1, R]`."""
        size = bucket_for(len(requests), self._row_buckets)
        return _fetch(self._decode(requests, decode_rows(requests, size), 1)[0], requests)

    def _decode(
        self,
        requests: Sequence[Request],
        rows: DecodeRows,
        num_steps: int,
        ready: jax.Array | np.bool_ = _READY,
    ) -> tuple[Drawn, DecodeRows]:
        drawn, after, self._kv_cache, self._history = self._steps.decode(
            len(rows.seat),
            *self._step_args(),
            rows,
            self._masks(requests, len(rows.seat)),
            np.int32(num_steps),
            ready,
        )
        return drawn, after

    # ---- compilation -----------------------------------------------------------------------

    def keep_programs_in(self, store: ProgramStore | None) -> None:
        """Load programs from `store` where it has them, and keep there what is compiled."""
        for program in self._all_programs():
            program.keep_in(store)

    @property
    def num_programs(self) -> int:
        """Programs compiled or loaded so far; never more than `len(self.warmups())`."""
        return sum(program.num_sizes for program in self._all_programs())

    @property
    def num_loaded(self) -> int:
        """Programs loaded whole from where they are kept, of those."""
        return sum(program.num_loaded for program in self._all_programs())

    def warmups(self) -> list[tuple[str, Callable[[], object]]]:
        """Every program by name, slowest first, with a call that compiles it without running it.

        The calls may run in threads of their own, but no step may run beside them.
        """
        kinds = (
            ("packed step of {} tokens", self._compile_packed, self._token_buckets),
            ("decode loop of {} sequences", self._compile_decode, self._row_buckets),
            (
                "speculative decode loop of {} sequences",
                self._compile_speculate,
                self._speculative_buckets,
            ),
        )
        steps = [
            (name.format(size), partial(compile_fn, size))
            for name, compile_fn, sizes in kinds
            for size in reversed(sizes)
        ]
        return [
            *steps,
            *self._block_warmups(),
            *self.adapters.warmups(),
        ]

    def _all_programs(self) -> tuple[Program, ...]:
        steps = (self._steps.packed, self._steps.decode, self._steps.speculate)
        return (*steps, *self._block_programs(), self.adapters.place)

    def _compile_packed(self, size: int) -> None:
        num_rows = self._step_rows(size)
        args = *packed_rows([], size, num_rows), self._masks([], num_rows)
        self._steps.packed.compile(size, *self._step_args(), *args)

    def _compile_decode(self, size: int) -> None:
        args = decode_rows([], size, 0), self._masks([], size), np.int32(0), _READY
        self._steps.decode.compile(size, *self._step_args(), *args)

    def _compile_speculate(self, size: int) -> None:
        self._steps.speculate.compile(size, *self._step_args(), decode_rows([], size, 0))

    # ---- arguments -------------------------------------------------------------------------

    def _step_args(self) -> tuple[object, ...]:
        weights = [*self._steps.weights, *self.adapters.leaves]
        return weights, self._kv_cache, self._history, self._tables.block_ids, self._params

    def _masks(self, requests: Sequence[Request | None], num_rows: int) -> TokenMasks:
        if all(request is None or request.grammar is None for request in requests):
            return self._no_masks[num_rows]
        return masks_of(requests, num_rows, self._vocab_size)

    def _step_rows(self, num_tokens: int) -> int:
        return min(num_tokens, self._config.max_num_seqs)


def _fetch(drawn: Drawn, requests: Sequence[Request]) -> Drawn:
    """What was drawn, on the host; logprobs come along only if one of the requests wants them."""
    if all(request.params.logprobs is None for request in requests):
        return replace(drawn, tokens=np.asarray(drawn.tokens))
    return jax.device_get(drawn)
