"""One model on one machine: seconds to compute a stretch of a prompt, or to restore it.

    >>> from octavo.paged.cost_model import HARDWARE, MODEL_SHAPES, CostModel
    >>> costs = CostModel(MODEL_SHAPES["llama-3.1-8b"], HARDWARE["h100"])
    >>> round(costs.seconds_to_recompute(0, 131_072), 1)
    14.2
    >>> round(costs.seconds_to_restore("host", 131_072), 3)
    0.316
    >>> costs.break_even_length("disk")  # a shorter prefix is computed sooner than it is read
    843

Every method is arithmetic on a few Python numbers: an engine can ask for each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .hardware import Hardware
from .seconds import prefill_seconds, work_seconds
from .shape import ModelShape
from .work import Count, Work, decode_work, head_work, kv_bytes, num_chunks, prefill_work

# Contexts beyond this are not asked about: nothing has ever been trained on them.
MAX_LENGTH = 1 << 28


@dataclass(frozen=True)
class CostModel:
    """What computing and restoring costs a model on `num_devices` of a machine's accelerators.

    Devices share heads and matrices evenly; what they say to one another counts as part of the
    efficiency. Each has a link to the host, all of them one disk and one network.

    Attributes:
        shape: the model.
        hardware: one device and its host.
        num_devices: devices that share the model.
        chunk_size: prompt tokens computed in one step.
    """

    shape: ModelShape
    hardware: Hardware
    num_devices: int = 1
    chunk_size: int = 512

    def __post_init__(self) -> None:
        self.shape.on_devices(self.num_devices)
        if type(self.chunk_size) is not int or self.chunk_size < 1:
            raise ValueError(f"chunk_size={self.chunk_size!r} must be a positive integer")

    @cached_property
    def device_shape(self) -> ModelShape:
        """The model as the devices hold it: KV heads are copied where there are too few."""
        return self.shape.on_devices(self.num_devices)

    @cached_property
    def machine(self) -> Hardware:
        """All devices as one."""
        one, count = self.hardware, self.num_devices
        return replace(
            one,
            peak_flops=one.peak_flops * count,
            peak_memory_bytes=one.peak_memory_bytes * count,
            memory_bytes=one.memory_bytes * count,
            peak_link_bytes=one.peak_link_bytes * count,
        )

    @cached_property
    def _restore_seconds_per_token(self) -> dict[str, float]:
        return self._seconds_per_token(self.machine.restore_rates)

    @cached_property
    def _store_seconds_per_token(self) -> dict[str, float]:
        return self._seconds_per_token(self.machine.store_rates)

    def _seconds_per_token(self, rates: Mapping[str, float]) -> dict[str, float]:
        """By tier. Between device and disk or network blocks pass through host memory, one after
        the other, so that both ways overlap: the slower one decides."""
        link = kv_bytes(self.device_shape, 1) / rates["host"]
        return {tier: max(link, kv_bytes(self.shape, 1) / rate) for tier, rate in rates.items()}

    @property
    def tiers(self) -> tuple[str, ...]:
        """Lower tiers that the machine has, the nearest first."""
        return tuple(self._restore_seconds_per_token)

    def seconds_to_recompute(self, start: Count, stop: Count) -> Any:
        """Seconds to compute the tokens from `start` to `stop`, those before being cached.

        Numbers, or arrays of them. The output head is left out: a request needs it either way.
        """
        return prefill_seconds(
            self.device_shape, self.machine, start, stop, chunk_size=self.chunk_size
        )

    def seconds_to_restore(self, tier: str, num_tokens: Count) -> Any:
        """Seconds to bring the keys and values of `num_tokens` tokens back from `tier`.

        Raises:
            ValueError: the machine has no such tier.
        """
        return self._per_token(self._restore_seconds_per_token, tier) * num_tokens

    def seconds_to_store(self, tier: str, num_tokens: Count) -> Any:
        """Seconds to write the keys and values of `num_tokens` tokens to `tier`.

        Raises:
            ValueError: the machine has no such tier.
        """
        return self._per_token(self._store_seconds_per_token, tier) * num_tokens

    def _per_token(self, seconds: dict[str, float], tier: str) -> float:
        if tier not in seconds:
            raise ValueError(
                f"{tier=} must be one of {', '.join(seconds)}: {self.hardware.name} has no other"
            )
        return seconds[tier]

    def request_work(self, num_cached: int, num_tokens: int) -> Work:
        """The work up to the first token of a prompt of `num_tokens`, `num_cached` of them cached.

        Raises:
            ValueError: not one token is left to compute.
        """
        if not 0 <= num_cached < num_tokens:
            raise ValueError(f"{num_cached=} must be from 0 to below {num_tokens=}")
        shape = self.device_shape
        prefill = prefill_work(shape, num_cached, num_tokens, chunk_size=self.chunk_size)
        return prefill + head_work(shape)

    def seconds_to_first_token(self, num_cached: int, num_tokens: int) -> float:
        """Seconds of `request_work`: of a miss if nothing is cached, else of a hit."""
        chunks = num_chunks(num_tokens - num_cached, self.chunk_size)
        work = self.request_work(num_cached, num_tokens)
        seconds = work_seconds(work, self.machine, kv_rate=self.machine.context_bytes_per_second)
        return seconds + chunks * self.hardware.dispatch_seconds

    def decode_work(self, context_len: int, *, num_seqs: int = 1, shared_len: int = 0) -> Work:
        """The work of one decode step: see `octavo.paged.cost_model.decode_work`."""
        return decode_work(self.device_shape, context_len, num_seqs=num_seqs, shared_len=shared_len)

    def seconds_to_decode(
        self, context_len: int, *, num_seqs: int = 1, shared_len: int = 0
    ) -> float:
        """Seconds of one decode step of `num_seqs` sequences."""
        work = self.decode_work(context_len, num_seqs=num_seqs, shared_len=shared_len)
        return work_seconds(work, self.machine) + self.hardware.dispatch_seconds

    def seconds_saved(self, num_cached: int, num_new: int) -> float:
        """What a hit of `num_cached` tokens saves a prompt with `num_new` more."""
        miss = self.seconds_to_first_token(0, num_cached + num_new)
        return miss - self.seconds_to_first_token(num_cached, num_cached + num_new)

    def break_even_length(self, tier: str, num_new: int = 1) -> int | None:
        """The shortest prefix that is restored sooner than computed; None if none is.

        `num_new` tokens after it are computed either way. Found by bisection: a longer prefix
        costs more to compute per token, and the same to restore.
        """

        def wins(length: int) -> bool:
            return self.seconds_to_restore(tier, length) <= self.seconds_saved(length, num_new)

        if not wins(MAX_LENGTH):
            return None
        low, high = 0, MAX_LENGTH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if wins(middle) else (middle, high)
        return high

    def break_even_bandwidth(self, num_tokens: int, num_new: int = 1) -> float:
        """Bytes per second from which restoring a prefix of `num_tokens` beats computing it."""
        return kv_bytes(self.shape, num_tokens) / self.seconds_saved(num_tokens, num_new)
