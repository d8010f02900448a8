"""The block manager's half of the runner: state, tables and KV cache, and what moves blocks.

Everything on device is donated from call to call; the host keeps no copy and reads back only the
flags that it must act on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .. import paged
from ..models import LlamaConfig
from ..paged.cost_model import cost_slope
from ..pallas_kernels import NULL_BLOCK, init_kv_cache
from . import block_programs
from .config import EngineConfig
from .held import Hold, SpareRows
from .layout import CacheLayout
from .model_shape import shape_of
from .prefix_lens import PrefixLens
from .program import Program
from .programs import KVCache, bucket_for
from .request import Request
from .rows import seat_of
from .seats import SeatParams, init_seats, no_params, params_of
from .staging import Loaded
from .tiers import LowerTiers

_PROTECTED_FRACTION = 0.8  # of the pool, in `slru`
_RESTORED_BATCHES = 8  # published at once: a call for each takes as long as its copy


class BlockRunner:
    """Gives requests their blocks, and takes, shares, copies and keeps them.

    Attributes:
        layout: of the KV cache.
        num_unpinned_blocks: what running requests can have together, whatever is pinned.
        spare_rows: rows of the tables beside the seats', for what is held between requests.
        prefix_lens: cached lengths of many requests at once.
        tiers: what is kept below the device, if anything.
    """

    def __init__(self, model: LlamaConfig, config: EngineConfig, layout: CacheLayout):
        self.layout = layout
        self._model, self._config = model, config
        num_blocks = self.layout.shape[0]
        self._kv_cache = init_kv_cache(model.num_layers, self.layout.shape, self.layout.dtype)
        self.num_unpinned_blocks = num_blocks - 1 - self._pin_budget()
        # A row for each seat, and as many spare ones.
        self._num_rows = 2 * config.max_num_seqs
        # One compilation for all the arrays in place of one for each.
        self._state, self._tables, (self._history, self._params) = jax.jit(self._init)()
        own = weakref.proxy(self)  # no cycle: the cache is to go with its last user
        rows = range(config.max_num_seqs, self._num_rows)
        self.spare_rows = SpareRows(rows, lambda row: own.release_seat(row))
        most = -(-config.max_decode_steps // config.block_size) + 1
        self._admit = Program("admit", block_programs.admit, donate=(0, 1, 2, 3))
        self._fork = Program("fork", block_programs.fork, donate=(0, 1, 2, 3))
        self._copy_on_write = Program("copy on write", block_programs.copy_on_write, donate=(0, 1))
        self._hold = Program("hold", block_programs.hold, donate=(0, 1))
        self._append = Program("append", block_programs.append, settings=most, donate=(0, 1))
        self._publish = Program("publish", paged.publish, donate=(0, 1))
        self._published: list[jax.Array] = []
        self._release = Program("release", paged.release, donate=(0, 1))
        self._copy = Program("copy", block_programs.copy, donate=(0,))
        self._copy_tails = Program("copy tails", block_programs.copy, donate=(0,))
        self._stats = Program("stats", paged.stats, donate=())
        self.tiers = LowerTiers(model, config, layout) if config.has_lower_tiers else None
        # Blocks that fill in one step, and one for each sequence that does not; and of a restore.
        filled = -(-config.max_num_batched_tokens // config.block_size) + (
            config.max_num_seqs * (1 + -(-config.max_decode_steps // config.block_size))
        )
        restored = 0 if self.tiers is None else _RESTORED_BATCHES * self.tiers.batch_blocks
        restored = max(filled, min(restored, self.layout.blocks_per_seq))
        self._publish_sizes = tuple(sorted({filled, restored}))
        self.prefix_lens = PrefixLens(self.layout, config.block_size, 4 * config.max_num_seqs)
        # Seldom called, and for few sizes: compiled when they are.
        self._pin = jax.jit(paged.pin_tokens, donate_argnums=0)
        self._unpin = jax.jit(paged.unpin_tokens, donate_argnums=0)
        self._reset = jax.jit(paged.reset_cache, donate_argnums=0)

    def _init(self) -> tuple[paged.CacheState, paged.BlockTables, tuple[jax.Array, SeatParams]]:
        num_blocks, columns = self.layout.shape[0], self.layout.blocks_per_seq
        policy = paged.eviction_policy(
            self._config.eviction_policy,
            slope=cost_slope(shape_of(self._model), self._config.block_size),
            protected=int(_PROTECTED_FRACTION * num_blocks),
        )
        return (
            paged.init_cache(
                num_blocks, self._config.block_size, policy=policy, pin_budget=self._pin_budget()
            ),
            paged.init_tables(self._num_rows, columns),
            init_seats(self._num_rows, columns * self._config.block_size),
        )

    def _pin_budget(self) -> int:
        # The longest request always finds room once the others are gone.
        room = self.layout.shape[0] - 1
        most = room - min(self.layout.blocks_per_seq, room)
        return min(int(self._config.max_pinned_fraction * room), most)

    def acting(self, now: int, owner: int) -> None:
        """What follows happens at time `now` for the request of number `owner`."""
        self._state = replace(self._state, now=np.int32(now), owner=np.int32(owner))

    def limit_block_cost(self, most: float) -> None:
        """Let eviction know what a block costs at most, in units of a prompt's first one."""
        policy = replace(self._state.policy, most=np.float32(most))
        self._state = replace(self._state, policy=policy)

    def explain(self, tokens: np.ndarray, namespace: int) -> paged.Explanation:
        """Why a prompt hits as far as it does."""
        return paged.explain(self._state, tokens, namespace)

    def pin(self, tokens: np.ndarray, namespace: int, until: int) -> int:
        """Pin a prompt's cached blocks; returns the tokens in them.

        Raises:
            PinBudgetExceeded: they are more than may be pinned.
        """
        blocks = _cut(tokens, self._config.block_size)
        self._state, count, ok = self._pin(self._state, blocks, len(tokens), namespace, until)
        if not ok:
            raise paged.PinBudgetExceeded(
                f"with this prompt more than {self._pin_budget()} blocks would be pinned "
                f"({int(self.stats().num_pinned)} are): unpin others first"
            )
        return int(count) * self._config.block_size

    def unpin(self, tokens: np.ndarray, namespace: int) -> None:
        """End the pins of a prompt's blocks."""
        blocks = _cut(tokens, self._config.block_size)
        self._state = self._unpin(self._state, blocks, len(tokens), namespace)

    def reset_cache(self, *, keep_pinned: bool) -> int:
        """Free the blocks that nobody holds; returns how many."""
        self.spare_rows.end_all()
        self._state, num_freed = self._reset(self._state, keep_pinned=keep_pinned)
        return int(num_freed)

    def copy_cache(self) -> tuple[paged.CacheState, KVCache]:
        """Copies of the block manager and of all keys and values."""
        self.spare_rows.end_all()
        return jax.tree.map(jnp.copy, (self._state, self._kv_cache))

    def set_cache(self, state: paged.CacheState, kv_cache: KVCache) -> None:
        """Go on from copies of what `copy_cache` returned; no seat may hold blocks."""
        self.spare_rows.end_all()
        self._state, self._kv_cache = jax.tree.map(jnp.copy, (state, kv_cache))

    def admit(self, request: Request, seat: int) -> int | None:
        """Give the request a table; returns the tokens found cached, or None if it does not fit."""
        args = self._admit_args(seat, request)
        self._state, self._tables, self._history, self._params, admission = self._admit(
            1, self._state, self._tables, *args
        )
        if not bool(admission.ok):
            return self.admit(request, seat) if self.spare_rows.give_way() else None
        if int(admission.copies.target) != NULL_BLOCK:
            self._kv_cache = self._copy(1, self._kv_cache, admission.copies)
        return int(admission.num_cached_tokens)

    def cached_lens(self, requests: Sequence[Request]) -> list[int]:
        """Tokens in the cached full blocks at the start of each request; see `PrefixLens`."""
        return self.prefix_lens(self._state.index, requests)

    def fork(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Let the second of each pair share all blocks of the first, instead of what it held.

        They ask for the same but for their seeds.
        """
        source, target, enabled = self._no_forks()
        seed = np.zeros(len(source), np.uint32)
        for i, (old, new) in enumerate(pairs):
            source[i], target[i], enabled[i] = seat_of(old), seat_of(new), True
            seed[i] = new.seed
            old.shares_tail = new.shares_tail = True
        self._state, self._tables, self._history, self._params, ok = self._fork(
            1, *self._seat_args(), source, target, enabled, seed
        )
        if not bool(ok):
            raise paged.InvariantViolation("a sequence could not be forked")

    def reserve(self, requests: Sequence[Request], more: int) -> bool:
        """Make room for up to `more` further tokens in each request's table, or in none's.

        Blocks to be written that others hold too are copied first.
        """
        while not self._try_to_reserve(requests, more):
            if not self.spare_rows.give_way():
                return False
        return True

    def _try_to_reserve(self, requests: Sequence[Request], more: int) -> bool:
        if not self._own_tails(requests):
            return False
        return bool(self.grow(requests, [request.num_computed + more for request in requests]))

    def grow(self, requests: Sequence[Request], lens: Sequence[int]) -> jax.Array:
        """Make room for so many tokens in each request's table, or in none's, without waiting.

        Their last blocks must be their own.

        Returns:
            `bool[]` on device, whether there was room.
        """
        of_rows = np.zeros(self._num_rows, np.int32)
        for request, length in zip(requests, lens, strict=True):
            of_rows[seat_of(request)] = min(length, request.max_computed)
        self._state, self._tables, ok = self._append(1, self._state, self._tables, of_rows)
        return ok

    def _own_tails(self, requests: Sequence[Request]) -> bool:
        """Copy the blocks that these requests write next, where others hold them too."""
        sharing = [request for request in requests if request.shares_tail]
        seats, positions, enabled = self._no_forks()
        for i, request in enumerate(sharing):
            seats[i], positions[i] = seat_of(request), request.num_computed
            # At the start of a block there is nothing to copy, and perhaps no block yet.
            enabled[i] = request.num_computed % self._config.block_size > 0
        if enabled.any():
            self._state, self._tables, copies, ok = self._copy_on_write(
                1, self._state, self._tables, seats, positions, enabled
            )
            if not bool(ok):
                return False
            self._kv_cache = self._copy_tails(1, self._kv_cache, copies)
        for request in sharing:
            request.shares_tail = False
        return True

    def publish(self, requests: Sequence[Request], tails: Sequence[Request] = ()) -> None:
        """Index every block of these requests that has filled since the last call.

        Of `tails`, the last block as well if it has tokens, so that others can go on from there.
        """
        size = self._config.block_size
        runs = [(r, r.num_published * size, r.num_computed // size * size) for r in requests]
        runs = [run for run in runs if run[1] < run[2]]  # nothing, at most steps of decode
        ends = [(r, r.num_computed // size * size, r.num_computed) for r in tails]
        spans = runs + [end for end in ends if end[1] < end[2]]
        # Those of one request side by side.
        spans.sort(key=lambda span: seat_of(span[0]))
        # Flags of the last call: those of this one come behind what the device is at.
        self._check_published()
        for filled, count in self._filled_blocks(spans):
            num_rows = len(filled.seat)
            self._state, self._tables, ok = self._publish(
                num_rows, self._state, self._tables, filled, np.int32(count)
            )
            self._published.append(ok)
        if self.tiers is not None and runs:
            full = [(r, first // size, end // size) for r, first, end in runs]
            self.tiers.save(self._kv_cache, self._tables.block_ids, full)
        for request in requests:
            request.num_published = max(request.num_published, request.num_computed // size)

    def _check_published(self) -> None:
        flags, self._published = self._published, []
        if not all(map(bool, flags)):
            raise paged.InvariantViolation("blocks that had just been filled were refused")

    def _filled_blocks(
        self, spans: Sequence[tuple[Request, int, int]]
    ) -> Iterator[tuple[paged.FilledBlocks, int]]:
        """The blocks of (request, first token, end), as many at a time as `publish` takes."""
        size, most = self._config.block_size, self._publish_sizes[-1]
        lens = [-(-(end - first) // size) for _, first, end in spans]
        total = sum(lens)
        rest = total % most
        num_rows = total - rest + (bucket_for(rest, self._publish_sizes) if rest else 0)
        filled = self._no_filled_blocks(num_rows)
        place = 0
        for (request, first, end), length in zip(spans, lens, strict=True):
            rows = slice(place, place + length)
            place += length
            filled.seat[rows], filled.namespace[rows] = seat_of(request), request.namespace
            filled.column[rows] = np.arange(length) + first // size
            filled.num_tokens[rows] = size
            if (end - first) % size:
                filled.num_tokens[place - 1] = (end - first) % size
            filled.tokens[rows].reshape(-1)[: end - first] = request.tokens[first:end]
        for start in range(0, total, most):
            part = jax.tree.map(lambda x, start=start: x[start : start + most], filled)
            yield part, min(total - start, most)

    def table_row(self, request: Request) -> jax.Array:
        """A request's blocks `int32[M]` as they are now, for `put_blocks`."""
        assert self.tiers is not None
        return self.tiers.row(self._tables.block_ids, request)

    def put_blocks(self, row: jax.Array, first: int, loaded: Loaded) -> int:
        """Overwrite a request's own blocks from column `first` on; see `LowerTiers.put`.

        Returns how many.
        """
        assert self.tiers is not None
        self._kv_cache, count = self.tiers.put(self._kv_cache, row, first, loaded)
        return count

    def keep(self, request: Request, hold: Hold) -> None:
        """Let `hold` hold what the request has computed, instead of what it held before."""
        self._hold_row(seat_of(request), hold, request.num_computed)

    def fork_hold(self, hold: Hold, other: Hold) -> None:
        """Let `other` hold the same as `hold`."""
        if hold.row is not None:
            self._hold_row(hold.row, other, hold.num_tokens, source_hold=hold)

    def _hold_row(
        self, source: int, hold: Hold, num_tokens: int, source_hold: Hold | None = None
    ) -> None:
        if not self._config.enable_prefix_caching:
            return  # nobody would find what is held
        row = self.spare_rows.row_for(hold, source_hold)
        if row is None or num_tokens == 0:
            self.spare_rows.let_go(hold)
            return
        self._state, self._tables, ok = self._hold(
            1, self._state, self._tables, np.int32(source), np.int32(row), np.int32(num_tokens)
        )
        hold.num_tokens = num_tokens if bool(ok) else 0

    def release(self, request: Request) -> None:
        """Give back the request's blocks; its seat is free afterwards."""
        request.shares_tail = False
        self.release_seat(seat_of(request))

    def release_seat(self, seat: int) -> None:
        """Give back what a seat holds, if anything."""
        self._state, self._tables, _ = self._release(1, self._state, self._tables, np.int32(seat))

    def stats(self) -> paged.CacheStats:
        """Blocks in each state."""
        return jax.device_get(self._stats(1, self._state))

    def check_invariants(self) -> None:
        """Check the block manager's invariants; raises `octavo.paged.InvariantViolation`."""
        self._check_published()
        paged.check_invariants(self._state, self._tables)

    # ---- compilation -----------------------------------------------------------------------

    def _block_programs(self) -> tuple[Program, ...]:
        manager = (self._admit, self._append, self._publish, self._release, self._stats)
        branching = (self._fork, self._hold, self._copy_on_write, self._copy_tails)
        transfers = () if self.tiers is None else self.tiers.programs
        return (*manager, *branching, self._copy, self.prefix_lens.program, *transfers)

    def _block_warmups(self) -> list[tuple[str, Callable[[], object]]]:
        seat, num, num_seats = np.int32(0), np.int32(0), (self._config.max_num_seqs,)
        seeds = np.zeros(num_seats, np.uint32)
        lens = np.zeros(self._num_rows, np.int32)
        manager: list[tuple[Program, tuple[object, ...]]] = [
            (self._admit, self._admit_args(0)),
            (self._append, (lens,)),
            (self._fork, (self._history, self._params, *self._no_forks(), seeds)),
            (self._hold, (seat, seat, num)),
            (self._copy_on_write, self._no_forks()),
            (self._release, (seat,)),
        ]
        warmups: list[tuple[str, Callable[[], object]]] = [
            (program.name, partial(program.compile, 1, self._state, self._tables, *args))
            for program, args in manager
        ]
        for num_rows in self._publish_sizes:
            args = num_rows, self._state, self._tables, self._no_filled_blocks(num_rows), num
            warmups.append((f"publish of {num_rows} blocks", partial(self._publish.compile, *args)))
        warmups += [(self._stats.name, partial(self._stats.compile, 1, self._state))]
        warmups += [
            (program.name, partial(program.compile, 1, self._kv_cache, _no_copies(num_copies)))
            for program, num_copies in ((self._copy, ()), (self._copy_tails, num_seats))
        ]
        if self._config.scheduling_policy == "lpm":
            lens_of = self.prefix_lens
            warmups += [(lens_of.program.name, partial(lens_of.compile, self._state.index))]
        if self.tiers is not None:
            warmups += self.tiers.warmups(self._kv_cache, self._tables.block_ids)
        return warmups

    # ---- arguments -------------------------------------------------------------------------

    def _admit_args(self, seat: int, request: Request | None = None) -> tuple:
        padded = np.zeros((self.layout.blocks_per_seq, self._config.block_size), np.int32)
        num_tokens = namespace = most = 0
        resumed = False
        if request is not None:
            num_tokens, namespace = request.num_tokens, request.namespace
            # Only what is looked up counts, and once.
            resumed = request.num_cached_tokens is not None or request.scores_prompt
            most = 0 if request.scores_prompt else num_tokens - 1
            padded.reshape(-1)[:num_tokens] = request.tokens[:num_tokens]
        params = no_params() if request is None else params_of(request)
        numbers = *map(np.int32, (num_tokens, namespace, most)), np.bool_(resumed)
        return self._history, self._params, np.int32(seat), padded, *numbers, params

    def _seat_args(self) -> tuple[object, ...]:
        return self._state, self._tables, self._history, self._params

    def _no_forks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, second = np.zeros((2, self._config.max_num_seqs), np.int32)
        return first, second, np.zeros(self._config.max_num_seqs, bool)

    def _no_filled_blocks(self, num_rows: int) -> paged.FilledBlocks:
        seat, column, num_tokens, namespace = np.zeros((4, num_rows), np.int32)
        tokens = np.zeros((num_rows, self._config.block_size), np.int32)
        return paged.FilledBlocks(
            seat=seat, column=column, tokens=tokens, num_tokens=num_tokens, namespace=namespace
        )


def _no_copies(shape: tuple[int, ...]) -> paged.BlockCopies:
    blocks = jax.device_put(np.full(shape, NULL_BLOCK, np.int32))
    return paged.BlockCopies(source=blocks, target=blocks)


def _cut(tokens: np.ndarray, block_size: int) -> jax.Array:
    """Full blocks, as many as the next power of two: few shapes, few compilations."""
    full = len(tokens) // block_size
    padded = np.zeros((1 << max(full - 1, 0).bit_length(), block_size), np.int32)
    padded.reshape(-1)[: full * block_size] = tokens[: full * block_size]
    return jnp.asarray(padded)
