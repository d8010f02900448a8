"""Tuning knobs of the TPU kernels, and what they are when nobody has tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...chips import Chip

# Of a chunk: the copies of a whole chunk are unrolled.
_MOST_BLOCKS = 128


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a kernel's memory depends on.

    Attributes:
        num_heads: N.
        num_kv_heads: K.
        block_size: B.
        row_width: ROW.
        head_size: H.
        itemsize: bytes of one number of the cache.
    """

    num_heads: int
    num_kv_heads: int
    block_size: int
    row_width: int
    head_size: int
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the cache, all KV heads."""
        return self.num_kv_heads * self.row_width * self.itemsize


@dataclass(frozen=True, kw_only=True)
class DecodeKnobs:
    """Sizes of the decode kernel, each a multiple of the block size or rounded to it.

    Attributes:
        chunk_tokens: tokens that one step of the pipeline copies and computes on.
        tail_tokens: tokens of one step of what remains after the last whole chunk.
    """

    chunk_tokens: int
    tail_tokens: int

    def vmem_bytes(self, sizes: Sizes) -> int:
        """Memory of the buffers that grow with the knobs, and of what is computed from them."""
        chunk = max(self.chunk_tokens, sizes.block_size)
        logits = max(sizes.num_heads, 8 * sizes.num_kv_heads) * 4
        upcast = 0 if sizes.itemsize == 2 else sizes.num_kv_heads * sizes.row_width * 4
        return chunk * (2 * sizes.token_bytes + 2 * logits + upcast)


@dataclass(frozen=True, kw_only=True)
class TilesKnobs:
    """Sizes of the prefill kernel.

    Attributes:
        tile_queries: queries of one tile, a power of two.
        chunk_tokens: keys that one step of the pipeline copies and computes on.
        lanes: rows (queries times query heads of a KV head) of one product, at most.
    """

    tile_queries: int
    chunk_tokens: int
    lanes: int

    def vmem_bytes(self, sizes: Sizes) -> int:
        """Memory of the buffers."""
        number = 2 if sizes.itemsize < 4 else 4
        width = -(-sizes.head_size // 128) * 128
        chunk = max(self.chunk_tokens, sizes.block_size)
        rows = self.tile_queries * sizes.num_heads
        # Words of two heads each, where an even number of heads shares a KV head.
        pack = 2 if number == 2 and sizes.num_heads // sizes.num_kv_heads % 2 == 0 else 1
        heads = -(-sizes.num_heads // (8 * pack)) * 8 * pack
        words = 3 * self.tile_queries * heads * width * 4 // pack
        queries = words + rows * (width * number + (sizes.head_size + 8) * 4)
        lanes = min(self.lanes, rows)
        patterns = max(1, -(-2 * self.tile_queries // lanes))
        scores = chunk * lanes * (2 * 4 + 2 * number + 4 * patterns)
        return queries + scores + 2 * chunk * sizes.token_bytes


def vmem_limit(chip: Chip) -> int:
    """What a kernel may ask for; the rest is the compiler's.

    On a 7x the compiler sets as much aside for itself as the kernel may ask for.
    """
    if chip.arch >= (7, 0):
        return chip.local_bytes * 31 // 64
    eighths = 6 if chip.local_bytes <= 16 << 20 else 5
    return chip.local_bytes * eighths // 8


def default_decode_knobs(sizes: Sizes, chip: Chip) -> DecodeKnobs:
    """Chunks as long as VMEM allows: each waits once for the first result of its products.

    A 7x core reads HBM at 1.7 KB a cycle, twice as much as others, and wants twice the chunk.
    """
    chunk = max(2048 if chip.arch >= (7, 0) else 1024, sizes.block_size)
    chunk = min(chunk, _MOST_BLOCKS * sizes.block_size)
    knobs = DecodeKnobs(chunk_tokens=chunk, tail_tokens=max(128, sizes.block_size))
    while knobs.vmem_bytes(sizes) > chip.local_bytes // 2 and chunk > max(128, sizes.block_size):
        chunk //= 2
        knobs = replace(knobs, chunk_tokens=chunk)
    return knobs


def default_tiles_knobs(sizes: Sizes, max_query_len: int, chip: Chip) -> TilesKnobs:
    """About 2048 rows per KV head, so that a chunk seldom waits for its first and last products."""
    groups = sizes.num_heads // sizes.num_kv_heads
    smallest = 1 << (max(1, 128 // groups) - 1).bit_length()
    tile = max(smallest, 1 << (2048 // groups).bit_length() - 1)
    tile = min(tile, max(smallest, 1 << (max_query_len - 1).bit_length()))
    knobs = TilesKnobs(tile_queries=tile, chunk_tokens=512, lanes=512)
    # The rest is for what the compiler spills.
    budget = min(chip.local_bytes // 2, vmem_limit(chip) * 7 // 8)
    while knobs.vmem_bytes(sizes) > budget and knobs.tile_queries > max(smallest, 1024 // groups):
        knobs = replace(knobs, tile_queries=knobs.tile_queries // 2)
    if knobs.vmem_bytes(sizes) > budget:
        knobs = replace(knobs, chunk_tokens=256)
    while knobs.vmem_bytes(sizes) > budget and knobs.tile_queries > smallest:
        knobs = replace(knobs, tile_queries=knobs.tile_queries // 2)
    if knobs.vmem_bytes(sizes) > budget:
        knobs = replace(knobs, chunk_tokens=128)
    return knobs
