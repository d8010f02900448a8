"""Speculation by prompt look-up: the text so far guesses how it goes on, one step checks it.

Where the last tokens of a sequence have occurred before, what followed them then is proposed. The
model computes the newest token and the proposals together and draws after each; proposals are
taken as long as they are what was drawn. Every draw depends on nothing but the tokens before it
and its own random numbers, so the tokens are those of plain decoding, greedy or not; positions
whose proposal was wrong are computed again by the next step.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); acceptance of exact
draws is the greedy case of speculative sampling (arXiv:2211.17192), made to hold for any
temperature by tying each draw to its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ..paged import packed_batch, token_positions
from .draw import draw
from .logprobs import TokenLogprobs, no_logprobs
from .seats import SeatParams

# Tokens that must have occurred before; of several places that with the longest match counts, and
# of those the last.
MIN_MATCH, MAX_MATCH = 2, 4


def may_propose(tokens: np.ndarray) -> bool:
    """Whether the end of `tokens: int32[n]` has occurred before."""
    if len(tokens) <= MIN_MATCH:
        return False
    same = np.ones(len(tokens) - MIN_MATCH, bool)
    for back in range(1, MIN_MATCH + 1):
        same &= tokens[MIN_MATCH - back : len(tokens) - back] == tokens[-back]
    return bool(same.any())


def propose(history: jax.Array, num_tokens: jax.Array, num_drafts: int) -> tuple[jax.Array, ...]:
    """Guess how sequences go on.

    Args:
        history: `int32[R, W]` their tokens.
        num_tokens: `int32[R]`, how many there are.
        num_drafts: D, static.

    Returns:
        `(drafts int32[R, D], found bool[R])`. A match that ends before D tokens is gone through
        again: it is the period of what repeats.
    """
    rows, width = history.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)
    length = jnp.zeros_like(history)  # of the match that ends at each place
    same = place < num_tokens[:, None] - 1
    for back in range(MAX_MATCH):
        newest = history[row, jnp.maximum(num_tokens - 1 - back, 0)]
        earlier = jnp.pad(history, ((0, 0), (back, 0)))[:, :width]
        same &= (earlier == newest[:, None]) & (place >= back)
        length += same.astype(jnp.int32)
    best = jnp.argmax(length * width + place, axis=1).astype(jnp.int32)
    found = length[row, best] >= MIN_MATCH
    period = jnp.maximum(num_tokens - 1 - best, 1)
    ahead = jnp.arange(num_drafts, dtype=jnp.int32) % period[:, None]
    return history[row[:, None], jnp.minimum(best[:, None] + 1 + ahead, width - 1)], found


def speculate(
    model_fn: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]],
    kv_cache: tuple[jax.Array, ...],
    history: jax.Array,
    block_ids: jax.Array,
    params: SeatParams,
    seat: jax.Array,
    context_len: jax.Array,
    limit: jax.Array,
    *,
    num_drafts: int,
    max_tokens: int,
    block_size: int,
) -> tuple[tuple[jax.Array, TokenLogprobs, jax.Array], tuple[jax.Array, ...], jax.Array]:
    """Decode with speculation until every row has its tokens or has stopped.

    Args:
        model_fn: `(tokens, positions, kv_cache, batch, row=) -> (logits, kv_cache)`, where
            `row: int32[T]` says whose tokens they are.
        kv_cache, history, block_ids, params: all seats'.
        seat: `int32[R]`.
        context_len: `int32[R]` tokens in the cache; the next one is in the history.
        limit: `int32[R]` most tokens to generate, 0 for padding. The tables have room for them.
        num_drafts: D, static: proposals checked in one step.
        max_tokens: static bound on `limit`.
        block_size: slots per block.

    Returns:
        `((tokens int32[max_tokens, R], logprobs, checked), kv_cache, history)`; tokens are -1 past
        a row's end, `checked: int32[2]` counts proposals made and taken.
    """
    num_rows, width = seat.shape[0], 1 + num_drafts
    size = num_rows * width
    tables, stop_ids = block_ids[seat], params.stop_ids[seat]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    ahead = jnp.arange(width, dtype=jnp.int32)

    def going(carry: tuple) -> jax.Array:
        return jnp.any(carry[1])

    def one(carry: tuple) -> tuple:
        count, active, kv_cache, history, out, checked = carry
        length = context_len + count  # in the cache; one more is known
        drafts, found = propose(history[seat], length + 1, num_drafts)
        num = jnp.where(active & found, jnp.minimum(num_drafts, limit - count - 1), 0)
        live = active[:, None] & (ahead <= num[:, None])
        # What is proposed counts as part of the text when what follows it is drawn.
        place = jnp.where(live[:, 1:], seat[:, None], history.shape[0])
        history = history.at[place, (length + 1)[:, None] + ahead[:-1]].set(drafts, mode="drop")

        query_lens = jnp.where(active, 1 + num, 0)
        context = jnp.where(active, length + 1 + num, 0)
        batch, position = packed_batch(
            tables, context, query_lens, num_tokens=size, block_size=block_size
        )
        owner, _, is_live = token_positions(context, batch.query_start, size)
        every = jnp.arange(size, dtype=jnp.int32)
        batch = replace(batch, logit_rows=every, max_query_len=width)
        tokens = history[seat[owner], position]
        logits, kv_cache = model_fn(tokens, position, kv_cache, batch, row=owner)
        drawn, logprobs, history = draw(logits, history, params, seat[owner], position + 1, is_live)

        # Back to [R, 1 + D]; entries that are not live mean nothing.
        packed = jnp.minimum(batch.query_start[:-1, None] + ahead, size - 1)
        drawn, logprobs = jax.tree.map(lambda x: x[packed], (drawn, logprobs))
        right = (drawn[:, :-1] == drafts) & live[:, 1:]
        taken = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        stops = jnp.any(drawn[..., None] == stop_ids[:, None], axis=-1)
        past = stops.astype(jnp.int32)
        stopped_before = jnp.cumsum(past, axis=1) > past
        kept = live & (ahead <= taken[:, None]) & ~stopped_before
        num_kept = jnp.sum(kept, axis=1, dtype=jnp.int32)
        at = jnp.where(kept, count[:, None] + ahead, max_tokens)
        out = jax.tree.map(
            lambda all_steps, x: all_steps.at[at, row[:, None]].set(x, mode="drop"),
            out,
            (drawn, logprobs),
        )
        checked += jnp.stack([jnp.sum(num), jnp.sum(jnp.maximum(num_kept - 1, 0))])
        count += num_kept
        still = active & ~jnp.any(stops & kept, axis=1) & (count < limit)
        return count, still, kv_cache, history, out, checked

    empty = jnp.full((max_tokens, num_rows), -1, jnp.int32), no_logprobs(max_tokens, num_rows)
    state = jnp.zeros(num_rows, jnp.int32), limit > 0
    *_, kv_cache, history, out, checked = jax.lax.while_loop(
        going, one, (*state, kv_cache, history, empty, jnp.zeros(2, jnp.int32))
    )
    tokens, logprobs = out
    return (tokens, logprobs, checked), kv_cache, history
