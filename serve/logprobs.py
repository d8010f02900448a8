"""How likely tokens were, by the model's own distribution: before anything changes the logits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .outputs import Logprob, Logprobs
from .sampling_params import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of any number of tokens, each `[...]`.

    Attributes:
        logprob: `float32[...]` of the token itself.
        rank: `int32[...]`, 1 for the likeliest.
        top_ids: `int32[..., 20]` the likeliest tokens, in order; equals by id.
        top_logprobs: `float32[..., 20]`.
    """

    logprob: jax.Array | np.ndarray
    rank: jax.Array | np.ndarray
    top_ids: jax.Array | np.ndarray
    top_logprobs: jax.Array | np.ndarray


def no_logprobs(*shape: int) -> TokenLogprobs:
    """Zeros for tokens of any shape."""
    return TokenLogprobs(
        logprob=jnp.zeros(shape, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def token_logprobs(logits: jax.Array, token: jax.Array) -> TokenLogprobs:
    """Of `token: int32[R]` under `logits: float32[R, V]`."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, token[:, None], axis=-1)
    top, top_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[-1]))
    return TokenLogprobs(
        logprob=(own - total)[:, 0],
        rank=1 + jnp.sum(logits > own, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids, missing, constant_values=-1),
        top_logprobs=jnp.pad(top - total, missing, constant_values=-jnp.inf),
    )


def report(logprobs: TokenLogprobs, at: tuple[int, ...], token: int, num_top: int) -> Logprobs:
    """What was found out about the token at index `at` and the likeliest `num_top` beside it."""
    own = Logprob(logprob=float(logprobs.logprob[at]), rank=int(logprobs.rank[at]))
    entry = {token: own}
    likeliest = zip(
        logprobs.top_ids[at][:num_top].tolist(),
        logprobs.top_logprobs[at][:num_top].tolist(),
        strict=True,
    )
    for rank, (other, logprob) in enumerate(likeliest, start=1):
        if other >= 0:
            entry.setdefault(other, Logprob(logprob=logprob, rank=rank))
    return entry
