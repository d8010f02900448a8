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
    """From two tiles each without keys, with a whole chunk, and with a masked step."""
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
    tile, chunk, step = knobs.tile_queries, knobs.chunk_tokens, knobs.masked_tokens
    two = jax.ShapeDtypeStruct((2 * tile, *q.shape[1:]), q.dtype)

    def cost(whole_chunks: int, masked_steps: int) -> int | None:
        def tiles(q, cache, tables, lens, start):  # type: ignore[no-untyped-def]
            profile = (whole_chunks, masked_steps)
            options = _options(case)
            return mosaic_tpu.tiles(
                q, cache, tables, lens, start, None, options, knobs=knobs, profile=profile
            )[0]

        return deviceless.compile_for(chip, tiles, (two, cache, tables, lens, start)).cycles

    costs = [cost(*profile) for profile in ((0, 0), (1, 0), (0, 1))]
    if None in costs:
        return None
    base, with_chunk, with_step = (c / 2 for c in costs if c is not None)
    total = 0.0
    before = case.context - case.tokens
    for first in range(before, case.context, tile):
        whole = (first + 1) // chunk
        masked = -(-(first + tile - whole * chunk) // step)
        total += base + whole * (with_chunk - base) + masked * (with_step - base)
    return round(total)


def _options(case: StaticCase) -> AttentionOptions:
    return AttentionOptions(
        max_query_len=max(1, case.tokens),
        scale=case.head_size**-0.5,
        sliding_window=None,
        soft_cap=None,
    )
