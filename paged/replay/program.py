"""The replay itself: every policy with every capacity as a lane of one vectorised program.

Each lane is a block manager of its own, the engine's: a request is admitted, all its blocks are
published, and it is released before the next one comes. A symbol of the trace is a token of the
manager, with one token per block. A whole prompt may be found, its last block too.

Lanes whose pools round up to the same size are one `vmap`; a lane with fewer blocks than
its pool starts with the rest withheld. All groups are in one program, a `scan` over some hundred
requests, which is run until the trace is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import admit
from ..cost_model import ModelShape, cost_slope
from ..errors import InvariantViolation
from ..eviction import POLICIES as POLICIES
from ..eviction import EvictionPolicy, eviction_policy
from ..publish import FilledBlocks, publish
from ..sharing import release
from ..state import CacheState, init_cache
from ..tables import BlockTables, init_tables
from .trace import Trace

ProgressFn = Callable[[int, int, str], None]

_REQUESTS_PER_RUN = 256
_PROTECTED_SHARE = 0.8  # of the capacity, in `slru`

Lanes = tuple[CacheState, BlockTables]


def replay_policies(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    shape: ModelShape,
    progress: ProgressFn | None = None,
) -> dict[tuple[str, int], np.ndarray]:
    """Run a trace through the block manager under every policy with every capacity.

    Args:
        trace: the requests.
        policies: names out of `POLICIES`.
        capacities: blocks that a cache holds, the null block not included.
        shape: the model that the policy `cost` counts FLOPs of.
        progress: called with (requests done, requests, what).

    Returns:
        `int32[R]` blocks that each request found, by policy and capacity; 0 for a request that
        asks for more blocks than there are and so is refused.

    Raises:
        ValueError: a name is unknown, or a capacity is below 1.
        InvariantViolation: a request was refused that fits: a bug of the block manager.
    """
    show = progress or (lambda done, total, what: None)
    lanes = [(policy, capacity) for policy in policies for capacity in capacities]
    slope = cost_slope(shape, trace.tokens_per_block)
    groups: dict[int, list[int]] = {}  # positions in `lanes` by blocks in the pool
    for lane, (_, capacity) in enumerate(lanes):
        if capacity < 1:
            raise ValueError(f"{capacity=} must be at least 1 block")
        groups.setdefault(_pool_size(capacity), []).append(lane)
    max_blocks = max(int(trace.num_blocks.max()), 1)
    states = tuple(
        _init_lanes(num_blocks, [_policy(*lanes[lane], slope) for lane in members], max_blocks)
        for num_blocks, members in groups.items()
    )
    capacity_of = np.array([capacity for _, capacity in lanes])
    found = np.zeros((trace.num_requests, len(lanes)), np.int32)
    order = [lane for members in groups.values() for lane in members]

    show(0, trace.num_requests, "compiling")
    for start in range(0, trace.num_requests, _REQUESTS_PER_RUN):
        stop = min(start + _REQUESTS_PER_RUN, trace.num_requests)
        states, (admitted, hits) = _run(states, *_requests(trace, start, stop, max_blocks))
        size = trace.num_blocks[start:stop, None]
        fits = (size > 0) & (size <= capacity_of)
        if not np.array_equal(np.asarray(admitted)[: stop - start], fits[:, order]):
            raise InvariantViolation(
                "the block manager refused a request that fits, or admitted one that does not"
            )
        found[start:stop, order] = np.asarray(hits)[: stop - start]
        show(stop, trace.num_requests, "replaying")
    return {lane: found[:, i] for i, lane in enumerate(lanes)}


def _pool_size(capacity: int) -> int:
    """A power of two; of four for small ones, so that few programs serve many capacities."""
    bits = capacity.bit_length()
    return 1 << (bits if bits >= 15 else bits + bits % 2)


def _policy(name: str, capacity: int, slope: float) -> tuple[EvictionPolicy, int]:
    protected = int(_PROTECTED_SHARE * capacity)
    return eviction_policy(name, slope=slope, protected=protected), capacity


def _init_lanes(
    num_blocks: int, members: Sequence[tuple[EvictionPolicy, int]], max_blocks: int
) -> Lanes:
    """Empty managers with `num_blocks` blocks each, of which a lane can use its capacity."""

    def stack(*lanes: jax.Array) -> jax.Array:
        return jnp.stack(lanes)

    policies = jax.tree.map(stack, *(policy for policy, _ in members))
    state = init_cache(num_blocks, 1)
    state = replace(state, pool=replace(state.pool, num_free=jnp.int32(0)))
    state, tables = jax.tree.map(
        lambda leaf: jnp.repeat(leaf[None], len(members), axis=0),
        (state, init_tables(1, max_blocks)),
    )
    # Whatever is past the top of the stack of free blocks is never handed out.
    num_free = jnp.array([capacity for _, capacity in members], jnp.int32)
    return replace(state, policy=policies, pool=replace(state.pool, num_free=num_free)), tables


def _requests(
    trace: Trace, start: int, stop: int, max_blocks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbols `int32[C, M]`, their number `int32[C]`, namespaces `int32[C]`; the end padded."""
    symbols = np.zeros((_REQUESTS_PER_RUN, max_blocks), np.int32)
    for row, request in enumerate(range(start, stop)):
        blocks = trace.blocks(request)
        symbols[row, : len(blocks)] = blocks
    padding = (0, _REQUESTS_PER_RUN - (stop - start))
    num_blocks = np.pad(trace.num_blocks[start:stop].astype(np.int32), padding)
    return symbols, num_blocks, np.pad(trace.namespaces[start:stop], padding)


@partial(jax.jit, donate_argnums=0)
def _run(
    groups: tuple[Lanes, ...], symbols: jax.Array, num_blocks: jax.Array, namespaces: jax.Array
) -> tuple[tuple[Lanes, ...], tuple[jax.Array, jax.Array]]:
    """The groups after C requests, and for each request and lane whether it was admitted
    (`bool[C, lanes]`) and the blocks that it found (`int32[C, lanes]`)."""

    def step(
        groups: tuple[Lanes, ...], request: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[Lanes, ...], tuple[jax.Array, jax.Array]]:
        done = [jax.vmap(partial(_serve, request=request))(*lanes) for lanes in groups]
        oks = jnp.concatenate([ok for _, _, ok, _ in done])
        hits = jnp.concatenate([hit for _, _, _, hit in done])
        return tuple((state, tables) for state, tables, _, _ in done), (oks, hits)

    return jax.lax.scan(step, groups, (symbols, num_blocks, namespaces))


def _serve(
    state: CacheState,
    tables: BlockTables,
    *,
    request: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[CacheState, BlockTables, jax.Array, jax.Array]:
    """One request from arrival to departure in one lane: (state, tables, ok, blocks found)."""
    symbols, count, namespace = request
    tokens = symbols[:, None]
    state, tables, got = admit(
        state, tables, 0, tokens, count, namespace, max_cached_tokens=count, min_copied_tokens=2
    )
    filled = FilledBlocks(
        seat=jnp.zeros_like(symbols),
        column=jnp.arange(symbols.shape[0], dtype=jnp.int32),
        tokens=tokens,
        num_tokens=jnp.ones_like(symbols),
        namespace=jnp.broadcast_to(namespace, symbols.shape),
    )
    state, tables, _ = publish(state, tables, filled, jnp.where(got.ok, count, 0))
    state, tables, _ = release(state, tables, 0)
    return state, tables, got.ok, got.num_cached_tokens
