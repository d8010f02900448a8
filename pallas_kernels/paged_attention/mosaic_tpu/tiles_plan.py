"""How a batch of several queries a sequence is cut into tiles, for the kernel of `tiles`."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...chips import interpret_argument
from ...layout import LANES
from ..arguments import AttentionOptions
from .knobs import TilesKnobs

_SUBLANES = 8


class Plan(NamedTuple):
    """Static sizes of one call.

    Attributes:
        tile: queries of a tile.
        pack: heads of one 32-bit word of a packed query row.
        block_size: B.
        pages: blocks of a chunk.
        lanes: rows of one product.
        causal: whether a query sees only the keys up to its own.
        simulated: whether an interpreter runs this that has no views of references.
    """

    tile: int
    pack: int
    block_size: int
    pages: int
    lanes: int
    causal: bool
    simulated: bool

    @classmethod
    def of(
        cls, knobs: TilesKnobs, *, groups: int, block_size: int, packs: bool, causal: bool
    ) -> Plan:
        """`packs`: whether the products are of 16-bit numbers, of which a word holds two."""
        return cls(
            tile=knobs.tile_queries,
            pack=2 if packs and groups % 2 == 0 else 1,
            block_size=block_size,
            pages=max(1, knobs.chunk_tokens // block_size),
            lanes=_lanes(knobs.tile_queries, groups, knobs.lanes),
            causal=causal,
            simulated=_is_simulated(),
        )

    @property
    def chunk(self) -> int:
        """Keys of a chunk."""
        return self.pages * self.block_size

    @property
    def patterns(self) -> int:
        """After how many products the queries on their lanes repeat."""
        word_rows = self.tile * self.pack
        return word_rows // math.gcd(word_rows, self.lanes)


def _is_simulated() -> bool:
    interpret = interpret_argument()
    if jax.__version_info__ < (0, 11):
        return interpret is not False
    return isinstance(interpret, pltpu.InterpretParams)


def _lanes(tile: int, groups: int, most: int) -> int:
    """The largest part of `tile * groups` rows that divides them and is not above `most`."""
    if tile >= most:
        return most
    return tile * max(d for d in range(1, groups + 1) if groups % d == 0 and tile * d <= most)


def query_words(q: jax.Array, width: int, pack: int) -> jax.Array:
    """Queries as rows of 128 lanes `[T, W/128 x N, 128]`, N rounded up to whole vectors.

    The kernel reads every N/pack-th 32-bit row, which wants a last axis of 128.
    """
    num_tokens, num_heads, head_size = q.shape
    padding = -num_heads % (_SUBLANES * pack)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, width - head_size)))
    q = q.reshape(num_tokens, -1, width // LANES, LANES).swapaxes(1, 2)
    return q.reshape(num_tokens, -1, LANES)


def outputs_of_words(words: jax.Array, width: int, num_heads: int, head_size: int) -> jax.Array:
    """Undo `query_words`: outputs `[T, N, H]`."""
    out = words.reshape(words.shape[0], width // LANES, -1, LANES).swapaxes(1, 2)
    return out.reshape(words.shape[0], -1, width)[:, :num_heads, :head_size]


def tile_list(
    context_lens: jax.Array,
    query_start: jax.Array,
    num_tokens: int,
    plan: Plan,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """The tiles as `int32[6, NT]`, and the row of the tiles that each token has.

    Of a tile: its sequence, first token, number of queries, last key that the first query sees,
    first block that any query sees, and number of blocks from there on.
    """
    tile = plan.tile
    num_seqs = context_lens.shape[0]
    query_lens = jnp.diff(query_start)
    per_seq = jnp.where(query_lens > 1, -(-query_lens // tile), 0)
    end = jnp.cumsum(per_seq)
    owners = min(num_seqs, max(num_tokens // 2, 1))
    bound = min(
        (num_tokens + owners * (tile - 1)) // tile, owners * -(-options.max_query_len // tile)
    )
    index = jnp.arange(max(bound, 1), dtype=jnp.int32)
    seq = jnp.searchsorted(end, index, side="right").astype(jnp.int32)
    used = seq < num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    offset = (index - (end - per_seq)[seq]) * tile
    count = jnp.where(used, jnp.minimum(tile, query_lens[seq] - offset), 0)
    seen = options.query_position(context_lens[seq], query_lens[seq], offset)
    last = seen + count if options.causal else seen + 1
    first = jnp.zeros_like(seen)
    if options.sliding_window is not None:
        first = jnp.maximum(seen - options.sliding_window + 1, 0) // plan.block_size
    blocks = jnp.where(used, -(-last // plan.block_size) - first, 0)
    scalars = jnp.stack([seq, query_start[seq] + offset, count, seen, first, blocks])

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, num_seqs - 1)
    row = (end - per_seq)[owner] * tile + token - query_start[owner]
    return scalars.astype(jnp.int32), jnp.clip(row, 0, index.shape[0] * tile - 1)
