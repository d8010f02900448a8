"""Tile sizes of the prefill kernels, by shape and chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...chips import Chip
from .tiles_load import Columns


@dataclass(frozen=True, kw_only=True)
class TilesKnobs:
    """What may be tuned.

    Attributes:
        rows: rows of a tile, tokens * G rounded up: 64 or 128.
        block_kv: keys of one step, a power of two.
        stages: steps of keys and values in shared memory.
        splits: programs that share the keys of one tile and KV head.
        words_units: chunks of an 8-bit cache on their way into shared memory, keys and values
            counted apart. `wgmma` only.
        weights_in_smem: pass the softmax weights to the second product through shared memory
            instead of registers: slower, but what interpret mode can run. `wgmma` only.
    """

    rows: int
    block_kv: int
    stages: int
    splits: int = 1
    words_units: int = 0
    weights_in_smem: bool = False


def tiles_knobs(columns: Columns, chip: Chip) -> TilesKnobs:
    """The heuristic for a head's columns on a chip."""
    return _wgmma_knobs(columns, chip) if chip.arch == (9, 0) else _mma_knobs(columns, chip)


def tile_splits(
    knobs: TilesKnobs, num_tokens: int, groups: int, num_kv_heads: int, max_context: int, chip: Chip
) -> int:
    """Programs per tile, so that few queries behind a long context use the whole chip.

    From static shapes alone: a sequence's bits must not depend on its companions. The tokens may
    all be one sequence's, so that the fewest tiles that hold them count. A split of less than
    four steps is not worth its merge.
    """
    fewest = -(-num_tokens // (knobs.rows // groups))
    wanted = chip.num_cores // (fewest * num_kv_heads)
    return max(1, min(wanted, max_context // (4 * knobs.block_kv)))


def _wgmma_knobs(columns: Columns, chip: Chip) -> TilesKnobs:
    """Two warpgroups of 64 rows, and 128 keys while the accumulators fit in 224 registers.

    A thread needs block_kv / 2 registers for scores, half as many for weights, and half of the
    columns for the output. As many stages as shared memory holds, up to 4.
    """
    rows = 128
    block_kv = 128 if columns.width <= 128 else 64
    chunk_bytes = 2 * block_kv * columns.width
    left = chip.local_bytes - 2 * rows * columns.width - 3072
    stages, words_units = left // (2 * chunk_bytes), 0
    if columns.parts == 2:
        words_units = 3 if left >= (2 * 2 + 3 / 2) * chunk_bytes else 2
        stages = (left - words_units * chunk_bytes // 2) // (2 * chunk_bytes)
    return TilesKnobs(rows=rows, block_kv=block_kv, stages=min(4, stages), words_units=words_units)


def _mma_knobs(columns: Columns, chip: Chip) -> TilesKnobs:
    """The first of the shapes below whose accumulators spill no registers, two programs per SM.

    More rows use a key more often, more keys rescale the output less often. TMA and its barriers
    take about 16 registers from the accumulators.
    """
    registers = 160 if chip.arch < (9, 0) else 144
    stages = 2
    shapes = ((128, 64), (128, 32), (64, 64), (64, 32))
    fitting = [shape for shape in shapes if _accumulators(columns, *shape) <= registers]
    for programs in (2, 1):
        for rows, block_kv in fitting:
            smem = 2 * rows * columns.width + 4 * stages * block_kv * columns.words + 3072
            if programs * smem <= chip.local_bytes:
                return TilesKnobs(rows=rows, block_kv=block_kv, stages=stages)
    raise NotImplementedError(f"heads of {columns.head_size} do not fit on a {chip.name}")


def _accumulators(columns: Columns, rows: int, block_kv: int) -> int:
    """Registers that a thread needs for scores and output."""
    return rows * (columns.width + block_kv) // 128
