"""How likely a prompt's own tokens are: computed beside its prefill, in bounded memory.

Logits come from hidden states, which no cache keeps. So a request that asks computes its prompt
whole, whatever is cached of it, until it has what it asked for; what it computes is published as
usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..models import HiddenStates
from .logprobs import TokenLogprobs, no_logprobs, report, token_logprobs
from .request import Request

# Logits of so many tokens exist at once: 6 MB with a vocabulary of 49,152.
_CHUNK = 32


def score(
    logits_fn: Callable[[HiddenStates], jax.Array],
    hidden: HiddenStates,
    following: jax.Array,
    wanted: jax.Array,
) -> TokenLogprobs:
    """How likely each token's follower was; zeros where no neighbour in a chunk wants to know.

    Args:
        logits_fn: from the hidden states of n tokens to logits `float32[n, V]`.
        hidden: those of T tokens.
        following: `int32[T]` the token after each.
        wanted: `bool[T]`.
    """
    num_tokens = following.shape[0]
    missing = -num_tokens % _CHUNK

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))
        return padded.reshape(-1, _CHUNK, *x.shape[1:])

    def one(chunk: tuple[HiddenStates, jax.Array, jax.Array]) -> TokenLogprobs:
        x, token, asked = chunk
        return jax.lax.cond(
            jnp.any(asked),
            lambda: token_logprobs(logits_fn(x), token),
            lambda: no_logprobs(_CHUNK),
        )

    scores = jax.lax.map(one, jax.tree.map(cut, (hidden, following, wanted)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], scores)


def record(work: Sequence[tuple[Request, int]], scores: TokenLogprobs) -> None:
    """Give each request that asked what a packed step of (request, tokens) has found out."""
    at = 0
    for request, count in work:
        if request.scores_prompt:
            wanted = request.params.prompt_logprobs or 0
            first = request.num_computed + 1
            last = min(request.num_computed + count, request.num_prompt_tokens - 1)
            for i, token in enumerate(request.tokens[first : last + 1].tolist()):
                request.prompt_logprobs[first + i] = report(scores, (at + i,), token, wanted)
        at += count
