"""Tile sizes of the prefill kernels, by shape and chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...chips import Chip


@dataclass(frozen=True, kw_only=True)
class TilesKnobs:
    """What may be tuned.

    Attributes:
        rows: rows of a tile, `tokens * G` rounded up; 64 per compute warpgroup.
        block_kv: keys of one step.
        stages: steps of keys and of values in flight.
        words_units: chunks of an 8-bit cache in flight, keys and values counted apart.
        weights_in_smem: pass the softmax weights to the second product through shared memory
            instead of registers: slower, but what interpret mode can run.
    """

    rows: int
    block_kv: int
    stages: int
    words_units: int = 3
    weights_in_smem: bool = False


def wgmma_knobs(head_size: int, itemsize: int, chip: Chip) -> TilesKnobs:
    """Two warpgroups of 64 rows; 128 keys while the accumulators fit 232 registers.

    Scores take block_kv / 2 registers of a thread, the weights half of that, the output H / 2.
    As many stages as shared memory holds, up to 4.
    """
    rows = 128
    block_kv = 128 if head_size <= 128 else 64
    chunk_bytes = block_kv * -(-head_size // 32) * 32 * 2
    words_units = 3 if itemsize == 1 else 0
    left = chip.local_bytes - rows * head_size * 2 - words_units * chunk_bytes // 2 - 3072
    return TilesKnobs(
        rows=rows,
        block_kv=block_kv,
        stages=min(4, left // (2 * chunk_bytes)),
        words_units=words_units,
    )
