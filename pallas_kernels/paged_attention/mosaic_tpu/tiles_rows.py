"""Packed rows of the prefill kernel: the 32-bit words of tokens, as rows of one KV head.

Word j of a KV head holds `pack` heads of a token. Words are read and written with a stride, which
separates KV heads at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...layout import LANES
from .tiles_plan import Plan


def unpack_rows(buffer_ref: Any, rows_ref: Any, k: int, plan: Plan) -> None:
    """Queries of a tile `[tile, W/128 x N, 128]` as rows of KV head k of `[K, R, W]`."""
    for word, rows, lane in _places(buffer_ref, rows_ref.shape, k, plan):
        if plan.simulated:
            row = buffer_ref[:, _heads(word, plan), :].reshape(-1, LANES)
        else:
            row = _words(buffer_ref, word, plan)[...]
            row = pltpu.bitcast(row, jnp.bfloat16) if plan.pack == 2 else row
        rows_ref[k, rows, lane] = row.astype(rows_ref.dtype)


def pack_rows(out: jax.Array, k: int, buffer_ref: Any, rows_shape: Any, plan: Plan) -> None:
    """Outputs of a KV head `[H, R]` into those of a tile `[tile, W/128 x N, 128]`."""
    out = jnp.pad(out, ((0, rows_shape[2] - out.shape[0]), (0, 0)))
    # Rounded first: the transposes of 16-bit numbers take half as long.
    out = out.astype(buffer_ref.dtype).T
    for word, rows, lane in _places(buffer_ref, rows_shape, k, plan):
        row = out[rows, lane]
        if plan.simulated:
            buffer_ref[:, _heads(word, plan), :] = row.reshape(plan.tile, plan.pack, LANES)
        else:
            row = pltpu.bitcast(row, jnp.int32) if plan.pack == 2 else row
            _words(buffer_ref, word, plan)[...] = row


def _places(
    buffer_ref: Any, rows_shape: Any, k: int, plan: Plan
) -> Iterator[tuple[int, slice, slice]]:
    """First words of a KV head, each with its rows and lanes in `[R, W]`."""
    _, num_rows, width = rows_shape
    word_rows = plan.tile * plan.pack
    per_head = num_rows // word_rows
    num_parts = width // LANES
    words_per_part = buffer_ref.shape[1] // plan.pack // num_parts
    for part in range(num_parts):
        for j in range(per_head):
            rows = slice(j * word_rows, (j + 1) * word_rows)
            lanes = slice(part * LANES, (part + 1) * LANES)
            yield part * words_per_part + k * per_head + j, rows, lanes


def _words(ref: Any, first_word: int, plan: Plan) -> Any:
    """One word of each token of `[tile, X, 128]`, as 32-bit `[tile, 128]`."""
    words_per_token = ref.shape[1] // plan.pack
    ref = ref.bitcast(jnp.int32) if plan.pack == 2 else ref
    flat = ref.reshape(plan.tile * words_per_token, LANES)
    return flat.at[pl.ds(first_word, plan.tile, stride=words_per_token), :]


def _heads(word: int, plan: Plan) -> Any:
    return pl.ds(word * plan.pack, plan.pack)
