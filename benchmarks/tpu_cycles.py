"""The TPU attention kernels' cycles by libtpu's static model, which wants loops of known length."""

from __future__ import annotations

import deviceless
import jax
from static_cases import StaticCase

from octavo.pallas_kernels import row_width
from octavo.pallas_kernels.paged_attention import mosaic_tpu
from octavo.pallas_kernels.paged_attention.arguments import AttentionOptions
from octavo.pallas_kernels.paged_attention.mosaic_tpu.knobs import Sizes, default_tiles_knobs


def modelled_cycles(chip: str, case: StaticCase) -> int | None:
    """Cycles of a decode or prefill kernel, or None where the model gives none."""
    return _decode(chip, case) if case.op == "decode" else _prefill(chip, case)


def _decode(chip: str, case: StaticCase) -> int | None:
    _, (q, cache, tables, lens, *_), _ = case.program("tpu")

    def decode(q: jax.Array, cache: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        options = _options(case)
        return mosaic_tpu.decode(q, cache, tables, lens, None, options, profile_len=case.context)[0]

    return deviceless.compile_for(chip, decode, (q, cache, tables, lens)).cycles


def _prefill(chip: str, case: StaticCase) -> int | None:
    """From few tiles with one or two chunks: what is paid once, for a tile and for a chunk."""
    _, (q, cache, tables, lens, start, *_), _ = case.program("tpu")
    sizes = Sizes(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        block_size=case.block_size,
        row_width=row_width(case.head_size, "tpu"),
        head_size=case.head_size,
        itemsize=cache.dtype.itemsize,
    )
    knobs = default_tiles_knobs(sizes, case.tokens, deviceless.chip_named(chip))
    tile = knobs.tile_queries

    def cost(num_tiles: int, num_chunks: int) -> int | None:
        def tiles(q, cache, tables, lens, start):  # type: ignore[no-untyped-def]
            options = _options(case)
            return mosaic_tpu.tiles(
                q, cache, tables, lens, start, None, options, knobs=knobs, profile=num_chunks
            )[0]

        few = jax.ShapeDtypeStruct((num_tiles * tile, *q.shape[1:]), q.dtype)
        return deviceless.compile_for(chip, tiles, (few, cache, tables, lens, start)).cycles

    two, three, longer = cost(2, 1), cost(3, 1), cost(3, 2)
    if two is None or three is None or longer is None:
        return None
    per_chunk = (longer - three) / 3
    per_tile = three - two - per_chunk
    once = two - 2 * (per_tile + per_chunk)
    firsts = range(case.context - case.tokens, case.context, tile)
    num_chunks = sum(-(-(first + tile) // knobs.chunk_tokens) for first in firsts)
    return round(once + len(firsts) * per_tile + num_chunks * per_chunk)


def _options(case: StaticCase) -> AttentionOptions:
    return AttentionOptions(
        max_query_len=max(1, case.tokens),
        scale=case.head_size**-0.5,
        sliding_window=None,
        soft_cap=None,
    )
