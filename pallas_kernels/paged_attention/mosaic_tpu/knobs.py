"""Tuning knobs of the TPU kernels, and what they are when nobody has tuned."""

from __future__ import annotations

from dataclasses import dataclass

from ...chips import Chip


@dataclass(frozen=True, kw_only=True)
class DecodeKnobs:
    """Sizes of the decode kernel.

    Attributes:
        chunk_tokens: tokens that one step of the pipeline copies and computes on.
        tail_tokens: tokens of one step of what remains after the last whole chunk.
    """

    chunk_tokens: int
    tail_tokens: int


def default_decode_knobs(
    *, num_kv_heads: int, block_size: int, row_width: int, itemsize: int, chip: Chip
) -> DecodeKnobs:
    """Long chunks, so that the waits for a product's first result are few, within VMEM."""
    token_bytes = num_kv_heads * row_width * itemsize
    budget = min(chip.local_bytes // 4, 16 << 20) // 2
    chunk = 1024
    while chunk > block_size and chunk * token_bytes > budget:
        chunk //= 2
    chunk = max(chunk, block_size)
    return DecodeKnobs(chunk_tokens=chunk, tail_tokens=min(chunk, max(block_size, 128)))


@dataclass(frozen=True, kw_only=True)
class TilesKnobs:
    """Sizes of the prefill kernel.

    Attributes:
        tile_queries: queries of one tile, a power of two.
        chunk_tokens: keys that one step of the pipeline copies, and computes on unmasked.
        masked_tokens: keys of one step where not every query sees every key.
        lanes: rows (queries times query heads of a KV head) of one product.
    """

    tile_queries: int
    chunk_tokens: int
    masked_tokens: int
    lanes: int


def default_tiles_knobs(
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    row_width: int,
    itemsize: int,
    max_query_len: int,
    chip: Chip,
) -> TilesKnobs:
    """Tiles of about 1024 rows per KV head, as far as VMEM allows."""
    groups = num_heads // num_kv_heads
    tile = 512
    while tile > 8 and tile * groups > 1024:
        tile //= 2
    chunk = max(512, block_size)
    tile = min(tile, max(8, 1 << (max_query_len - 1).bit_length()))
    return TilesKnobs(tile_queries=tile, chunk_tokens=chunk, masked_tokens=min(chunk, max(256, block_size)), lanes=512)
