"""Tile sizes of the decode kernel, by shape and chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...chips import Chip

# Two programs per SM: one computes while the other waits, and 128 threads of each may use every
# register that a thread can address.
PROGRAMS_PER_SM = 2
MAX_TILE = 128
_STAGE_BYTES = 32 << 10
_MAX_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class DecodeKnobs:
    """What may be tuned.

    Attributes:
        tile: keys of one step, a multiple of 32 and a multiple or a divisor of B.
        stages: steps whose keys and values are in flight or in use.
        splits: programs that share the keys of one sequence and KV head.
    """

    tile: int
    stages: int
    splits: int


def decode_knobs(
    num_seqs: int,
    num_kv_heads: int,
    max_context: int,
    row_bytes: int,
    fixed_bytes: int,
    chip: Chip,
) -> DecodeKnobs:
    """Fill the chip: two programs for every SM, each with all the stages that fit, up to 4.

    A step is up to 32 KiB, for which an SM of an H200 waits 1 us; counted in instructions, a step
    takes a fifth of that, or a half where 8-bit numbers are converted. `row_bytes` are those of a
    key and its value, `fixed_bytes` the shared memory that a program needs beside the stages.
    """
    tile = MAX_TILE
    while tile > 32 and tile * row_bytes > _STAGE_BYTES:
        tile //= 2
    stages = 0
    for programs in range(PROGRAMS_PER_SM, 0, -1):
        stages = (chip.local_bytes // programs - fixed_bytes) // (tile * row_bytes)
        if stages >= 2:
            break
    return DecodeKnobs(
        tile=tile,
        stages=min(_MAX_STAGES, stages),
        splits=num_splits(num_seqs, num_kv_heads, max_context, tile, chip),
    )


def num_splits(num_seqs: int, num_kv_heads: int, max_context: int, tile: int, chip: Chip) -> int:
    """Programs per sequence and KV head, so that all together fill the chip once.

    From static shapes alone: a sequence's result must not depend on the others' lengths.
    """
    wanted = -(-PROGRAMS_PER_SM * chip.num_cores // (num_seqs * num_kv_heads))
    return max(1, min(wanted, -(-max_context // tile)))
