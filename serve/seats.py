"""What the device keeps of each seat: the tokens of its request, and how to sample the next one.

Both are written when a request is admitted; steps append the tokens that they sample. A step needs
from the host no more than which seats take part and how long their sequences are, and a loop of
many steps nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from .request import Request
from .sampling import SamplingRows
from .sampling_params import MAX_LOGIT_EDITS

NUM_STOP_IDS = 8
_FOR_EVER = np.iinfo(np.int32).max

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SeatParams:
    """How to sample for each of S seats; `[S]` where not said.

    Attributes:
        num_prompt: `int32`, length of the prompt.
        temperature, top_p, min_p, top_k, seed: as in `SamplingRows`.
        repetition_penalty, presence_penalty, frequency_penalty: `float32`; 1, 0 and 0 do nothing.
        num_logprobs: `int32`, likeliest tokens to report beside each sampled one; -1 for no report.
        stop_ids: `int32[S, 8]` tokens that end the sequence, -1 for none. Those that do not fit
            are left to the host, which checks them all.
        num_edits: `int32`, how many of the following there are.
        edit_ids, edit_values, edit_until: `[S, E]`, int32, float32 and int32: to the logit of a
            token a value is added as long as fewer than `until` tokens have been generated.
    """

    num_prompt: Array
    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seed: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    num_logprobs: Array
    stop_ids: Array
    num_edits: Array
    edit_ids: Array
    edit_values: Array
    edit_until: Array


def init_seats(num_seats: int, num_tokens: int) -> tuple[jax.Array, SeatParams]:
    """Room for `num_seats` requests: their tokens `int32[S, num_tokens]`, and parameters."""
    params = jax.tree.map(lambda x: jnp.tile(x, (num_seats,) + (1,) * np.ndim(x)), no_params())
    return jnp.zeros((num_seats, num_tokens), jnp.int32), params


def take_seat(params: SeatParams, seat: jax.Array, own: SeatParams) -> SeatParams:
    """Write one request's parameters, of no leading axis, to its seat."""
    return jax.tree.map(lambda all_seats, one: all_seats.at[seat].set(one), params, own)


def rows_of(
    params: SeatParams, seat: jax.Array, num_tokens: jax.Array, live: jax.Array
) -> SamplingRows:
    """Parameters of the seats `int32[R]` whose sequences have `num_tokens: int32[R]`.

    Rows that are not `live: bool[R]` ask for nothing: whoever had their seat asks no more.
    """
    return SamplingRows(
        temperature=jnp.where(live, params.temperature[seat], 0.0),
        top_p=params.top_p[seat],
        min_p=params.min_p[seat],
        top_k=params.top_k[seat],
        seed=params.seed[seat],
        index=num_tokens - params.num_prompt[seat],
    )


def no_params() -> SeatParams:
    """One seat's parameters, of no leading axis, that ask for nothing."""
    zero, one, none = _float(0), _float(1), _int(0)
    return SeatParams(
        num_prompt=none,
        temperature=zero,
        top_p=one,
        min_p=zero,
        top_k=none,
        seed=np.asarray(0, np.uint32),
        repetition_penalty=one,
        presence_penalty=zero,
        frequency_penalty=zero,
        num_logprobs=_int(-1),
        stop_ids=np.full(NUM_STOP_IDS, -1, np.int32),
        num_edits=none,
        **_edit_lists([]),
    )


def params_of(request: Request) -> SeatParams:
    """One request's parameters, of no leading axis."""
    asked, own = request.params, no_params()
    stop_ids = (*request.stop_ids, *[-1] * NUM_STOP_IDS)[:NUM_STOP_IDS]
    edits = [(token, value, _FOR_EVER) for token, value in (asked.logit_bias or {}).items()]
    if asked.min_tokens:
        edits += [(token, -np.inf, asked.min_tokens) for token in request.stop_ids]
    return replace(
        own,
        num_prompt=_int(request.num_prompt_tokens),
        # Below these float32 overflows or rounds to 0; what they ask for is the likeliest token.
        temperature=_float(asked.temperature if asked.temperature >= 1e-5 else 0),
        top_p=_float(max(asked.top_p, 1e-6)),
        min_p=_float(asked.min_p),
        top_k=_int(asked.top_k),
        seed=np.asarray(request.seed, np.uint32),
        repetition_penalty=_float(asked.repetition_penalty),
        presence_penalty=_float(asked.presence_penalty),
        frequency_penalty=_float(asked.frequency_penalty),
        num_logprobs=_int(-1 if asked.logprobs is None else asked.logprobs),
        stop_ids=np.asarray(stop_ids, np.int32),
        num_edits=_int(len(edits)),
        **_edit_lists(edits),
    )


def _edit_lists(edits: Sequence[tuple[int, float, int]]) -> dict[str, np.ndarray]:
    ids, until = np.zeros((2, MAX_LOGIT_EDITS), np.int32)
    values = np.zeros(MAX_LOGIT_EDITS, np.float32)
    for i, edit in enumerate(edits):
        ids[i], values[i], until[i] = edit
    return {"edit_ids": ids, "edit_values": values, "edit_until": until}


def _float(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


def _int(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)
