"""Restore or compute, by what each takes on this machine: calibrated at the start, then learned.

`octavo.paged.cost_model.plan_restore` decides for each request. What becomes of it is counted: the
seconds that were predicted, those that passed, and the regret, by which they exceed what the way
not taken was predicted to take. Seconds pass for other requests too, so that under load they are
more than predicted either way.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ..models import Llama
from ..paged.cost_model import (
    CostModel,
    ModelShape,
    calibrate,
    fit_prefill,
    fit_restore,
    plan_restore,
)
from ..paged.cost_model.hardware import Hardware
from .config import EngineConfig
from .layout import CacheLayout
from .loads import Watch
from .model_shape import shape_of
from .outputs import RestoreStats

logger = logging.getLogger(__name__)

# What nobody has timed yet: a network of 10 Gb/s, a disk that could not be written to.
_REMOTE_BYTES = 1.25e9
_DISK_BYTES = 5e8
_MAX_PREFILLS = 64
_REFIT_EVERY = 8
# Each time a tier is passed over, what it is believed to take shrinks by this, down to what it took
# at the start: once it was slow, it is tried again after a while (twice as slow, after 35 times).
_FORGIVEN = 0.98


class RestoreChoice:
    """Decides what is restored, and learns from what it takes.

    Args:
        costs: of the model on this machine; None always restores.
        block_size: B.
    """

    def __init__(self, costs: CostModel | None, block_size: int):
        self.costs = self._costs_at_first = costs
        self._block_size = block_size
        self._prefills: deque[tuple[int, int, float]] = deque(maxlen=_MAX_PREFILLS)
        self._num_prefills = 0
        self.stats = RestoreStats()

    def choose(
        self, first_token: int, tiers: Sequence[str], *, may_split: bool
    ) -> tuple[int, int, Watch]:
        """The blocks `[start, stop)` of a stretch that are restored, none if the two are equal."""
        n = len(tiers)
        plan = None
        if self.costs is not None:
            plan = plan_restore(
                self.costs, first_token, self._block_size, tiers, may_split=may_split
            )
        field = "num_restored"
        if plan is not None:
            if plan.decision == "recompute":
                self._forgive(tiers[0], n * self._block_size)
            fields = {"recompute": "num_recomputed", "restore": "num_restored"}
            field = fields.get(plan.decision, "num_split")
        self.stats = replace(self.stats, **{field: getattr(self.stats, field) + 1})
        watch = Watch(
            plan=plan,
            tiers=tiers,
            stop_token=first_token + n * self._block_size,
            begun=time.perf_counter(),
        )
        return (0, n, watch) if plan is None else (plan.start, plan.stop, watch)

    def _forgive(self, tier: str, num_tokens: int) -> None:
        assert self.costs is not None and self._costs_at_first is not None
        believed = self.costs.seconds_to_restore(tier, num_tokens)
        at_first = self._costs_at_first.seconds_to_restore(tier, num_tokens)
        if believed > at_first:
            seconds = max(_FORGIVEN * believed, at_first)
            self.costs = fit_restore(self.costs, tier, num_tokens, seconds)

    def carried_out(self, watch: Watch) -> None:
        """All of a stretch is there, as it was planned."""
        plan, seconds = watch.plan, time.perf_counter() - watch.begun
        if plan is None or self.costs is None:
            return
        computed = plan.decision == "recompute"
        other = plan.restore_seconds if computed else plan.recompute_seconds
        before = self.stats
        self.stats = replace(
            before,
            predicted_seconds=before.predicted_seconds + plan.seconds,
            actual_seconds=before.actual_seconds + seconds,
            regret_seconds=before.regret_seconds + max(seconds - other, 0.0),
        )
        tier = watch.tiers[0]
        if plan.decision == "restore" and watch.alone and set(watch.tiers) == {tier}:
            # Half way to what was seen.
            seen = float(np.sqrt(seconds * plan.seconds))
            num_tokens = len(watch.tiers) * self._block_size
            self.costs = fit_restore(self.costs, tier, num_tokens, seen)

    def cost_of_restoring(self, tier: str) -> float:
        """What a block from `tier` takes, in units of computing a prompt's first block.

        Infinite where that has not been measured.
        """
        if self.costs is None:
            return math.inf
        chunk, size = self.costs.chunk_size, self._block_size
        first = self.costs.seconds_to_recompute(0, chunk) * size / chunk
        return self.costs.seconds_to_restore(tier, size) / first

    def computed(self, start: int, stop: int, seconds: float) -> None:
        """A step that computed nothing but these tokens of one prompt took so long."""
        costs = self.costs
        if costs is None or 2 * (stop - start) < costs.chunk_size:
            return
        if seconds <= costs.hardware.dispatch_seconds:
            return
        self._prefills.append((start, stop, seconds))
        self._num_prefills += 1
        if self._num_prefills % _REFIT_EVERY == 0:
            self.costs = fit_prefill(costs, list(self._prefills))


def choice_for(model: Llama, config: EngineConfig, layout: CacheLayout) -> RestoreChoice:
    """What an engine decides by; measures the machine, once in a process for such a model."""
    if not config.has_lower_tiers or config.restore_policy == "always":
        return RestoreChoice(None, config.block_size)
    shape = shape_of(
        model.config,
        param_dtype_bytes=model.dtype.itemsize,
        kv_dtype_bytes=layout.dtype.itemsize,
    )
    folder = Path(config.disk_cache_dir).expanduser() if config.has_disk_cache else None
    chunk_size = config.max_num_batched_tokens
    hardware = _measured(shape, chunk_size, folder)
    return RestoreChoice(CostModel(shape, hardware, chunk_size=chunk_size), config.block_size)


@cache
def _measured(shape: ModelShape, chunk_size: int, folder: Path | None) -> Hardware:
    begin = time.perf_counter()
    try:
        hardware = calibrate(shape, chunk_size=chunk_size, disk_folder=folder)
    except OSError as error:  # full, or read-only: what is there can still be read
        logger.warning("the disk of %s could not be measured: %s", folder, error)
        hardware = calibrate(shape, chunk_size=chunk_size)
        hardware = replace(hardware, peak_disk_read_bytes=_DISK_BYTES)
    logger.info(
        "%s: %.0f GFLOP/s in products, %.0f in attention, %.1f GB/s from host memory (measured in "
        "%.1f s)",
        hardware.name,
        hardware.matmul_flops_per_second / 1e9,
        hardware.attention_flops_per_second / 1e9,
        hardware.link_bytes_per_second / 1e9,
        time.perf_counter() - begin,
    )
    return replace(hardware, peak_remote_bytes=_REMOTE_BYTES)
