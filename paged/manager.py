"""The block manager for the host: the pure functions with exceptions instead of `ok=False`.

For notebooks and servers that step from Python. A call that cannot be done raises and leaves
everything as it was; one that can is a single dispatch that overwrites the old state.

    >>> manager = BlockManager(num_blocks=8, block_size=4, num_seqs=2, blocks_per_seq=4)
    >>> manager.admit(0, [1, 2, 3, 4, 5, 6]).num_cached_tokens
    0
    >>> manager.publish(0, [1, 2, 3, 4, 5, 6])
    >>> manager.admit(1, [1, 2, 3, 4, 5, 9]).num_cached_tokens
    5
    >>> manager.release(1)
    >>> manager.release(1)
    Traceback (most recent call last):
    ValueError: seat=1 holds no sequence: admit or fork one first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from . import cache, pins, sharing
from .cache import CacheStats
from .errors import InvariantViolation, OutOfBlocks, PinBudgetExceeded
from .eviction import EvictionPolicy
from .explain import Explanation, explain
from .invariants import check_invariants
from .publish import FilledBlocks, publish
from .state import FOREVER, CacheState, acting, init_cache
from .tables import BlockTables, init_tables


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A sequence's start.

    Attributes:
        num_cached_tokens: tokens that need not be computed.
        copies: `(source, target)` blocks to copy first.
    """

    num_cached_tokens: int
    copies: tuple[tuple[int, int], ...]


class BlockManager:
    """A pool with its index and tables, owned by one host thread.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens per block.
        num_seqs: seats.
        blocks_per_seq: longest table.
        policy: of eviction; None means LRU.
        pin_budget: blocks that may be pinned at once. At most what leaves the longest sequence
            room, so that pins can never keep one from being admitted.

    Raises:
        ValueError: a size is out of range, or the budget is too large.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_seqs: int,
        blocks_per_seq: int,
        policy: EvictionPolicy | None = None,
        pin_budget: int = 0,
    ):
        if pin_budget > max(num_blocks - 1 - blocks_per_seq, 0):
            raise ValueError(
                f"{pin_budget=} must be at most {num_blocks=} - 1 - {blocks_per_seq=}, so that the "
                "longest sequence always finds room"
            )
        self.state: CacheState = init_cache(
            num_blocks, block_size, policy=policy, pin_budget=pin_budget
        )
        self.tables: BlockTables = init_tables(num_seqs, blocks_per_seq)
        self._jitted: dict[Any, Callable[..., Any]] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.state.index.block_size

    def admit(
        self, seat: int, tokens: Sequence[int], *, namespace: int = 0, priority: int = 0
    ) -> Admitted:
        """Give a sequence the blocks that it shares and those that it needs.

        Raises:
            ValueError: the seat is taken or out of range, or the sequence is empty or too long.
            OutOfBlocks: the pool is too small or too full for it.
        """
        self._check_seat(seat, used=False)
        if priority < 0:
            raise ValueError(f"{priority=} must not be negative")
        blocks = self._blocks(tokens)
        got = self._call(
            cache.admit, np.int32(seat), blocks, len(tokens), namespace, priority=priority
        )
        if not got.ok:
            raise OutOfBlocks(
                f"{len(tokens)} tokens do not fit: {self._room()}; release sequences or unpin"
            )
        source, target = int(got.copies.source), int(got.copies.target)
        copies = ((source, target),) if target else ()
        return Admitted(num_cached_tokens=int(got.num_cached_tokens), copies=copies)

    def append(self, num_tokens: dict[int, int]) -> None:
        """Make room for so many tokens in each of some sequences, or in none.

        Raises:
            ValueError: a seat is empty or out of range, or a length exceeds the table.
            OutOfBlocks: the pool is too full.
        """
        size, most = self.block_size, self.tables.block_ids.shape[1]
        lens = np.zeros(len(self.tables.num_blocks), np.int32)
        for seat, length in num_tokens.items():
            self._check_seat(seat, used=True)
            if not 0 <= length <= most * size:
                raise ValueError(f"{length=} of {seat=} must be in [0, {most * size}]")
            lens[seat] = length
        if not self._call(partial(cache.append, max_new_blocks=most), lens):
            raise OutOfBlocks(f"the tables cannot grow: {self._room()}; release sequences")

    def publish(self, seat: int, tokens: Sequence[int], *, namespace: int = 0) -> None:
        """Let others find all blocks of a sequence whose first tokens these are.

        Raises:
            ValueError: the seat is empty or out of range, there are more tokens than room, its
                last block is held by others and would gain tokens, or a block is found by other
                tokens already: it was written without `copy_on_write`.
        """
        self._check_seat(seat, used=True)
        blocks, size = self._blocks(tokens), self.block_size
        columns = np.arange(len(blocks), dtype=np.int32)
        count = -(-len(tokens) // size)
        filled = FilledBlocks(
            seat=np.full(len(blocks), seat, np.int32),
            column=columns,
            tokens=blocks,
            num_tokens=np.clip(len(tokens) - columns * size, 0, size).astype(np.int32),
            namespace=np.full(len(blocks), namespace, np.int32),
        )
        if not self._call(publish, filled, count):
            raise ValueError(
                f"{len(tokens)} tokens of {seat=} cannot be published: it has room for "
                f"{int(self.tables.num_blocks[seat]) * size}, or its last block is shared, or a "
                "block was published with other tokens or in another namespace"
            )

    def fork(self, source: int, target: int) -> None:
        """Let an empty seat share all blocks of another.

        Raises:
            ValueError: the source is empty, the target is not, or one is out of range.
        """
        self._check_seat(source, used=True)
        self._check_seat(target, used=False)
        self._must(self._call(sharing.fork, np.int32(source), np.int32(target)))

    def copy_on_write(self, seat: int, position: int) -> tuple[tuple[int, int], ...]:
        """Make the block that is about to be written the sequence's own; blocks to copy first.

        Raises:
            ValueError: the seat is empty or out of range, the position has no block, or blocks
                after it are indexed: truncate first.
            OutOfBlocks: there is no block for the copy.
        """
        self._check_seat(seat, used=True)
        room = int(self.tables.num_blocks[seat])
        column = position // self.block_size
        if not 0 <= column < room:
            raise ValueError(
                f"{position=} of {seat=} must be in [0, {room * self.block_size}): append first"
            )
        after = np.asarray(self.tables.block_ids[seat])[column + 1 : room]
        if np.asarray(self.state.index.num_tokens)[after].any():
            raise ValueError(f"{position=} of {seat=} is before indexed blocks: truncate first")
        copies, ok = self._call(sharing.copy_on_write, np.int32(seat), np.int32(position))
        if not ok:
            raise OutOfBlocks(f"no block for a copy: {self._room()}; release sequences")
        pair = int(copies.source[0]), int(copies.target[0])
        return (pair,) if pair[1] else ()

    def truncate(self, seat: int, num_tokens: int) -> None:
        """Give back the blocks past a sequence's first tokens.

        Raises:
            ValueError: the seat is empty or out of range, or holds fewer tokens.
        """
        self._check_seat(seat, used=True)
        room = int(self.tables.num_blocks[seat]) * self.block_size
        if not 0 <= num_tokens <= room:
            raise ValueError(f"{num_tokens=} of {seat=} must be in [0, {room}]")
        self._must(self._call(sharing.truncate, np.int32(seat), np.int32(num_tokens)))

    def release(self, seat: int) -> None:
        """Give back all blocks of a sequence.

        Raises:
            ValueError: the seat is empty or out of range.
        """
        self._check_seat(seat, used=True)
        self._must(self._call(sharing.release, np.int32(seat)))

    def pin(self, tokens: Sequence[int], *, namespace: int = 0, until: int = FOREVER) -> int:
        """Pin the cached full blocks at the start of `tokens`; returns how many there are.

        Raises:
            PinBudgetExceeded: they are more than the budget has left; nothing is pinned.
        """
        args = self._blocks(tokens), len(tokens), namespace, until
        return self._pinned(self._call_state(pins.pin_tokens, *args))

    def pin_sequence(self, seat: int, *, until: int = FOREVER) -> int:
        """Pin the indexed blocks of a running sequence; as `pin`.

        Raises:
            ValueError: the seat is empty or out of range.
            PinBudgetExceeded: as of `pin`.
        """
        self._check_seat(seat, used=True)
        args = self.tables, np.int32(seat), until
        return self._pinned(self._call_state(pins.pin_sequence, *args))

    def pin_namespace(self, namespace: int, *, until: int = FOREVER) -> int:
        """Pin what a namespace has cached now; as `pin`."""
        return self._pinned(self._call_state(pins.pin_namespace, namespace, until))

    def unpin(self, tokens: Sequence[int], *, namespace: int = 0) -> None:
        """End the pins of the cached full blocks at the start of `tokens`."""
        self._call_state(pins.unpin_tokens, self._blocks(tokens), len(tokens), namespace)

    def unpin_namespace(self, namespace: int) -> None:
        """End all pins of a namespace."""
        self._call_state(pins.unpin_namespace, namespace)

    def acting(self, *, now: int, owner: int = 0) -> None:
        """What follows happens at time `now` on behalf of `owner`."""
        self.state = acting(self.state, now=now, owner=owner)

    def explain(self, tokens: Sequence[int], *, namespace: int = 0) -> Explanation:
        """Why a prompt hits as far as it does."""
        return explain(self.state, tokens, namespace)

    def stats(self) -> CacheStats:
        """Blocks in each state, and tokens looked up and found."""
        return jax.device_get(cache.stats(self.state))

    def check_invariants(self) -> None:
        """Check the bookkeeping; raises `InvariantViolation`."""
        check_invariants(self.state, self.tables)

    def _check_seat(self, seat: int, *, used: bool) -> None:
        seats = len(self.tables.num_blocks)
        if not 0 <= seat < seats:
            raise ValueError(f"{seat=} must be in [0, {seats})")
        held = int(self.tables.num_blocks[seat])
        if used and not held:
            raise ValueError(f"{seat=} holds no sequence: admit or fork one first")
        if not used and held:
            raise ValueError(f"{seat=} holds a sequence of {held} blocks: release it first")

    def _blocks(self, tokens: Sequence[int]) -> np.ndarray:
        columns, size = self.tables.block_ids.shape[1], self.block_size
        if not 1 <= len(tokens) <= columns * size:
            raise ValueError(f"{len(tokens)=} must be in [1, {columns * size}]")
        blocks = np.zeros((columns, size), np.int32)
        blocks.reshape(-1)[: len(tokens)] = tokens
        return blocks

    @staticmethod
    def _must(ok: Any) -> None:
        if not ok:
            raise InvariantViolation("the block manager refused what was checked before: a bug")

    def _room(self) -> str:
        now = self.stats()
        return (
            f"{int(now.num_free)} blocks are free, {int(now.num_cached)} cached "
            f"({int(now.num_pinned)} pinned), {int(now.num_active)} in use"
        )

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(op, "func", op)
        if name not in self._jitted:
            self._jitted[name] = jax.jit(op, donate_argnums=(0, 1))
        self.state, self.tables, *result = self._jitted[name](
            self.state, self.tables, *args, **kwargs
        )
        return result[0] if len(result) == 1 else tuple(result)

    def _call_state(self, op: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        if op not in self._jitted:
            self._jitted[op] = jax.jit(op, donate_argnums=0)
        result = self._jitted[op](self.state, *args)
        self.state, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        return rest

    def _pinned(self, result: tuple[Any, ...]) -> int:
        count, ok = result
        if not ok:
            raise PinBudgetExceeded(
                f"more blocks than the budget of {int(self.state.pin_budget)} would be pinned "
                f"({int(self.stats().num_pinned)} are): unpin some first"
            )
        return int(count)
