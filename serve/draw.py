"""From logits to each row's next token: mask, edit, sample, report, remember."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .logit_edits import asks_for_edits, edit_logits
from .logprobs import TokenLogprobs, no_logprobs, token_logprobs
from .sampling import likeliest, sample
from .seats import SeatParams, rows_of
from .token_masks import TokenMasks, mask_logits


def draw(
    logits: jax.Array,
    history: jax.Array,
    params: SeatParams,
    seat: jax.Array,
    num_tokens: jax.Array,
    live: jax.Array,
    masks: TokenMasks | None = None,
) -> tuple[jax.Array, TokenLogprobs, jax.Array]:
    """Draw the token that follows each row's tokens, and append it to them.

    Args:
        logits: `float32[R, V]`.
        history: `int32[S, W]` tokens by seat.
        params: parameters by seat.
        seat: `int32[R]`.
        num_tokens: `int32[R]` tokens that each sequence has.
        live: `bool[R]`; the other rows' tokens mean nothing and are not remembered.
        masks: which tokens may come; None for any.

    Returns:
        `(token int32[R], logprobs [R], history)`; logprobs are zeros unless a row wants them.
    """
    rows = rows_of(params, seat, num_tokens, live)
    asks = jnp.any(rows.temperature > 0) | asks_for_edits(params, seat, live)
    if masks is not None:
        asks |= jnp.any(masks.constrained)

    def choose() -> jax.Array:
        possible = logits if masks is None else mask_logits(logits, masks)
        return sample(edit_logits(possible, history, params, seat, num_tokens, live), rows)

    # Apart, as XLA copies all logits for each thing that might be done with them.
    token = jax.lax.cond(asks, choose, lambda: likeliest(logits))
    logprobs = jax.lax.cond(
        jnp.any(live & (params.num_logprobs[seat] >= 0)),
        lambda: token_logprobs(logits, token),
        lambda: no_logprobs(token.shape[0]),
    )
    place = jnp.where(live, seat, history.shape[0])
    return token, logprobs, history.at[place, num_tokens].set(token, mode="drop")
