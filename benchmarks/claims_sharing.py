"""Memory that sharing saves while several answers to a prompt are made: samples, and beams.

As Kwon et al. count it: the blocks that the block tables name more than once would be blocks of
their own without sharing, so what is saved is one minus the distinct blocks over all entries of
the tables. Read from the engine's tables after every step, and averaged over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.serve import BeamSearchParams, Engine, SamplingParams

SAMPLED, BEAMS = "parallel sampling", "beam search"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Prompts of about one length, and how much is generated."""

    name: str
    prompts: Sequence[list[int]]
    num_tokens: int


def count_blocks(engine: Engine) -> tuple[int, int]:
    """Entries of the block tables that name a block, and distinct blocks among them."""
    tables = engine._runner._tables
    columns = np.arange(tables.block_ids.shape[1])
    used = columns < np.asarray(tables.num_blocks)[:, None]
    return int(used.sum()), len(np.unique(np.asarray(tables.block_ids)[used]))


def saved_share(engine: Engine, load: Load, params: SamplingParams | BeamSearchParams) -> float:
    """The part of the blocks that sharing saves, over all steps.

    Raises:
        RuntimeError: the block manager counts other blocks than its tables name.
    """
    for prompt in load.prompts:
        engine.add_branches(prompt, params)
    entries = distinct = 0
    while engine.num_unfinished:
        engine.step()
        named, blocks = count_blocks(engine)
        if blocks != (active := engine.stats().num_active_blocks):
            raise RuntimeError(f"the tables name {blocks} blocks, and {active} are active")
        entries, distinct = entries + named, distinct + blocks
    return 1 - distinct / entries


def measure_sharing(
    engine: Engine, loads: Sequence[Load], widths: Sequence[int]
) -> dict[str, dict[str, dict[int, float]]]:
    """What is saved, by load, by way of search, and by its width.

    Args:
        engine: decodes one step per dispatch, so that every step is seen.
        loads: what is asked.
        widths: samples, and beams, per prompt.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for load in loads:
        own = found[load.name] = {SAMPLED: {}, BEAMS: {}}
        for width in widths:
            engine.reset_cache()
            sampling = SamplingParams(
                n=width, max_tokens=load.num_tokens, seed=0, temperature=1.0, ignore_eos=True
            )
            own[SAMPLED][width] = saved_share(engine, load, sampling)
            engine.reset_cache()
            beams = BeamSearchParams(beam_width=width, max_tokens=load.num_tokens, ignore_eos=True)
            own[BEAMS][width] = saved_share(engine, load, beams)
    return found
