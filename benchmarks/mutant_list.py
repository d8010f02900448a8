"""The mutants of `kernel_mutants.py`: what is broken, where, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, WRITE, SMALL = "test_paged_attention.py", "test_write_kv.py", "test_small_ops.py"
TPU, RACES = "v6 lite-generic", "v6 lite-races"
GPU = "H200-simulate"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Replace `old`, which occurs once in `pallas_kernels/<file>`, by `new`."""

    what: str
    file: str
    old: str
    new: str
    tests: str
    select: str


MUTANTS: tuple[Mutant, ...] = ()
