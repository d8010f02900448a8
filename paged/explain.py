"""Why a prompt hits the cache as far as it does and no further: as data and as one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas_kernels import NULL_BLOCK
from .cache import MAX_CHILDREN
from .hashing import chain_hashes
from .history import recall
from .index import longest_child, match
from .state import CacheState

Reason = Literal["whole", "unaligned", "evicted", "namespace", "diverged", "ended", "new"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the cache holds of a prompt, and why not more.

    Attributes:
        num_tokens: length of the prompt.
        num_cached_tokens: tokens from its start that admission would find.
        reason: why it stops there.

            * `whole`: only the last token is left, and its logits are needed.
            * `unaligned`: a few more are cached, in a block of which too few tokens are shared to
              be worth a copy.
            * `evicted`: the next block was cached and had to go.
            * `namespace`: another namespace (model, adapter, tenant, ...) holds more.
            * `diverged`: what is cached goes on with another token.
            * `ended`: what is cached goes no further.
            * `new`: nothing that begins so has been cached, as far as is remembered.
        cached_token, prompt_token: where it diverged, the two tokens.
        num_evicted_tokens: how much further it would have hit.
        evicted_at, evicted_for: time and owner of the eviction, as given to `acting`.
        other_namespace, num_other_tokens: the namespace that holds most, and how much.
        num_tier_tokens: how many more tokens tiers below the device hold, where there are any.
    """

    num_tokens: int
    num_cached_tokens: int
    reason: Reason
    cached_token: int | None = None
    prompt_token: int | None = None
    num_evicted_tokens: int = 0
    evicted_at: int | None = None
    evicted_for: int | str | None = None
    other_namespace: int | None = None
    num_other_tokens: int = 0
    num_tier_tokens: int = 0

    def __str__(self) -> str:
        start = f"{self.num_cached_tokens} of {self.num_tokens} tokens are cached: "
        at = self.num_cached_tokens
        more = f"; the next {self.num_tier_tokens} are in tiers below the device"
        return (
            start
            + {
                "whole": "all but the last, which is always computed",
                "unaligned": f"from token {at} on too few of a block are shared to be worth a copy",
                "evicted": f"the next {self.num_evicted_tokens} were, and were evicted at time "
                f"{self.evicted_at} to make room for {self.evicted_for or 'others'}",
                "namespace": f"namespace {self.other_namespace} holds {self.num_other_tokens} of "
                "them, but another model, adapter, cache type or tenant shares nothing",
                "diverged": f"token {at} is {self.prompt_token}, and what is cached goes on with "
                f"{self.cached_token}",
                "ended": f"what is cached ends at token {at}",
                "new": "nothing that begins like it has been cached",
            }[self.reason]
            + (more if self.num_tier_tokens else "")
        )


def explain(
    state: CacheState,
    tokens: Sequence[int] | np.ndarray,
    namespace: int,
    *,
    min_copied_tokens: int = 1,
) -> Explanation:
    """Explain how far a prompt hits; on the host, and nothing is changed.

    Args:
        state: the manager.
        tokens: the prompt, at least one token.
        namespace: its namespace.
        min_copied_tokens: as admission has it.

    Raises:
        ValueError: the prompt is empty.
    """
    prompt = np.asarray(tokens, np.int32).reshape(-1)
    if not prompt.size:
        raise ValueError("an empty prompt cannot be explained: give at least one token")
    size, index = state.index.block_size, state.index
    # As many blocks as the next power of two: few shapes, few compilations.
    columns = 1 << (-(-prompt.size // size) - 1).bit_length()
    blocks = np.zeros((columns, size), np.int32)
    blocks.reshape(-1)[: prompt.size] = prompt
    limit = prompt.size - 1

    path, matched = _match(index, jnp.asarray(blocks), limit // size, namespace)
    matched = int(matched)
    parent = int(path[matched - 1]) if matched else NULL_BLOCK
    rest = min(limit - matched * size, size)
    following = jnp.asarray(blocks[min(matched, len(blocks) - 1)])
    child, shared = (int(x) for x in _longest(index, parent, namespace, following, rest))
    copied = shared if shared >= min_copied_tokens else 0
    found = matched * size + copied

    def because(reason: Reason, **details: int) -> Explanation:
        return Explanation(
            num_tokens=prompt.size, num_cached_tokens=found, reason=reason, **details
        )

    if found == limit:
        return because("whole")
    if gone := _evicted(state, blocks, prompt.size, namespace, matched, found):
        return because("evicted", **gone)
    if other := _other_namespace(state, blocks, limit, namespace, found):
        return because("namespace", **other)
    if copied < shared:
        return because("unaligned")
    return _end(state, prompt, namespace, parent, child, shared, because)


_match = jax.jit(match)
_longest = jax.jit(partial(longest_child, max_children=MAX_CHILDREN))
_recall = jax.jit(
    lambda history, tokens, namespace: recall(history, chain_hashes(tokens, namespace))
)


def _evicted(
    state: CacheState,
    blocks: np.ndarray,
    num_tokens: int,
    namespace: int,
    matched: int,
    found: int,
) -> dict[str, int] | None:
    size = state.index.block_size
    full = num_tokens // size
    place, there = (np.asarray(x) for x in _recall(state.history, jnp.asarray(blocks), namespace))
    there = there[matched:full]
    count = len(there) if there.all() else int(np.argmin(there))
    further = min((matched + count) * size, num_tokens - 1) - found
    if further <= 0:
        return None
    return {
        "num_evicted_tokens": further,
        "evicted_at": int(state.history.time[place[matched]]),
        "evicted_for": int(state.history.owner[place[matched]]),
    }


def _other_namespace(
    state: CacheState, blocks: np.ndarray, limit: int, namespace: int, found: int
) -> dict[str, int] | None:
    index = state.index
    roots = np.asarray(index.indexed & (index.parent == NULL_BLOCK))
    roots = roots & (np.asarray(index.tokens) == blocks[0]).all(axis=1)
    best = (found, namespace)
    for other in np.unique(np.asarray(index.namespace)[roots]):
        if int(other) != namespace:
            _, matched = _match(index, jnp.asarray(blocks), limit // index.block_size, int(other))
            held = int(matched) * index.block_size
            best = (held, int(other)) if held > best[0] else best
    if best[1] == namespace:
        return None
    return {"num_other_tokens": best[0], "other_namespace": best[1]}


def _end(
    state: CacheState,
    prompt: np.ndarray,
    namespace: int,
    parent: int,
    child: int,
    shared: int,
    because: Callable[..., Explanation],
) -> Explanation:
    index = state.index
    at = because("new").num_cached_tokens
    if child != NULL_BLOCK and shared < int(index.num_tokens[child]):
        cached = int(index.tokens[child, shared])
        return because("diverged", cached_token=cached, prompt_token=int(prompt[at]))
    if child != NULL_BLOCK:
        return because("ended")
    children = np.asarray(index.indexed & (index.parent == parent) & (index.namespace == namespace))
    if children.any() and parent != NULL_BLOCK:
        newest = int(np.argmax(np.where(children, np.asarray(index.last_access), -1)))
        cached = int(index.tokens[newest, 0])
        return because("diverged", cached_token=cached, prompt_token=int(prompt[at]))
    return because("ended" if parent != NULL_BLOCK else "new")
