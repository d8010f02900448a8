"""What a request changes about the logits before a token is drawn: bias, min tokens, penalties.

As vLLM does and in its order: first tokens are biased or banned, then repetition, frequency and
presence are penalised. Rows that ask for nothing keep their logits to the bit, and nothing is
computed unless a row asks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .seats import SeatParams


def edit_logits(
    logits: jax.Array,
    history: jax.Array,
    params: SeatParams,
    seat: jax.Array,
    num_tokens: jax.Array,
    live: jax.Array,
) -> jax.Array:
    """Edit `logits: float32[R, V]` of the token that follows each row's `num_tokens: int32[R]`.

    Args:
        logits: as the model gave them.
        history: `int32[S, W]` tokens by seat; only the first `num_tokens` of a row count.
        params: parameters by seat.
        seat: `int32[R]`.
        num_tokens: tokens that each sequence has.
        live: `bool[R]`; the other rows ask for nothing.
    """
    logits = jax.lax.cond(
        jnp.any(live & _biased(params)[seat]),
        lambda x: _bias(x, params, seat, num_tokens),
        lambda x: x,
        logits,
    )
    return jax.lax.cond(
        jnp.any(live & _penalised(params)[seat]),
        lambda x: _penalise(x, history[seat], params, seat, num_tokens),
        lambda x: x,
        logits,
    )


def asks_for_edits(params: SeatParams, seat: jax.Array, live: jax.Array) -> jax.Array:
    """Whether any of the `live: bool[R]` rows wants its logits edited, `bool[]`."""
    return jnp.any(live & (_biased(params) | _penalised(params))[seat])


def _biased(params: SeatParams) -> jax.Array:
    return jnp.asarray(params.num_edits) > 0


def _penalised(params: SeatParams) -> jax.Array:
    penalised = (params.repetition_penalty != 1) | (params.frequency_penalty != 0)
    return jnp.asarray(penalised | (params.presence_penalty != 0))


def _bias(
    logits: jax.Array, params: SeatParams, seat: jax.Array, num_tokens: jax.Array
) -> jax.Array:
    num_rows, vocab = logits.shape
    index = num_tokens - params.num_prompt[seat]
    entry = jnp.arange(params.edit_ids.shape[1], dtype=jnp.int32)[None, :]
    holds = (entry < params.num_edits[seat][:, None]) & (index[:, None] < params.edit_until[seat])
    token = jnp.where(holds, params.edit_ids[seat], vocab)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return logits.at[row, token].add(params.edit_values[seat], mode="drop")


def _penalise(
    logits: jax.Array,
    tokens: jax.Array,
    params: SeatParams,
    seat: jax.Array,
    num_tokens: jax.Array,
) -> jax.Array:
    num_rows, vocab = logits.shape
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    known = position < num_tokens[:, None]
    generated = known & (position >= params.num_prompt[seat][:, None])
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]

    def count(which: jax.Array) -> jax.Array:
        token = jnp.where(which, tokens, vocab)
        return jnp.zeros((num_rows, vocab), jnp.int32).at[row, token].add(1, mode="drop")

    repetition = params.repetition_penalty[seat][:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(count(known) > 0, repeated, logits)
    counts = count(generated).astype(jnp.float32)
    logits -= params.frequency_penalty[seat][:, None] * counts
    return logits - params.presence_penalty[seat][:, None] * (counts > 0).astype(jnp.float32)
