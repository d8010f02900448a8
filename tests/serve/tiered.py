"""Small engines with tiers below the device, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from octavo import paged
from octavo.models import LoadedModel
from octavo.serve import Completion, Engine, SamplingParams

from .tiny import tiny_engine

SIZE = 8
BLOCK_GIB = 2 * 2 * SIZE * 32 * 4 / 2**30  # two layers, two heads, rows of 32, float32
SIZES = {
    "num_blocks": 24,
    "block_size": SIZE,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 160,
    "max_decode_steps": 4,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tiered(tiny: LoadedModel, *, host: int = 0, disk: Path | None = None, **config) -> Engine:
    folder = "" if disk is None else str(disk)
    own = {"host_cache_gib": host * BLOCK_GIB, "disk_cache_dir": folder, "disk_cache_gib": 0.1}
    return tiny_engine(tiny, **(SIZES | own | config))


def prompt(seed: int, length: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def evict(engine: Engine, seed: int = 1000) -> None:
    """Fill the device with something else, and leave nothing there of what was."""
    engine.generate([prompt(seed, 150)], GREEDY)
    engine.generate([prompt(seed + 1, 150)], GREEDY)
    stack_of(engine).flush()
    # Eviction remembers what was often used, in other tests too.
    engine._runner.reset_cache(keep_pinned=True)


def stack_of(engine: Engine):
    found = engine._runner.tiers
    assert found is not None
    return found.stack


def let_threads_read(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Have host memory's blocks read as a device does that has a memory of its own."""
    patch.setattr(engine._runner.tiers, "_lender", None)


def one(engine: Engine, tokens: list[int], params: SamplingParams = GREEDY) -> Completion:
    return engine.generate([tokens], params)[0]


def kept(engine: Engine, tokens: list[int], cache_salt: str = "") -> np.ndarray:
    """The keys and values of a prompt's cached full blocks, `[n, L, K, B, ROW]`."""
    runner = engine._runner
    _, namespace = engine._intake.prompt(tokens, cache_salt, None)
    full = len(tokens) // SIZE
    cut = jnp.asarray(np.reshape(tokens[: full * SIZE], (full, SIZE)), jnp.int32)
    ids, count = paged.match(runner._state.index, cut, full, namespace)
    ids = np.asarray(ids)[: int(count)]
    return np.stack([np.asarray(layer)[ids] for layer in runner._kv_cache], axis=1)


def from_tiers(engine: Engine) -> dict[str, int]:
    return {name: stats.hits for name, stats in engine.stats().tiers.items()}
