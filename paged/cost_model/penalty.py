"""What a prefix costs to miss, to restore and to hit, and what is worth pinning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .model import CostModel
from .seconds import roofline
from .work import kv_bytes

MEMORY_SHARE = 0.9
"""Of a device's memory that weights and blocks may take (vLLM's default): the rest is for
activations and programs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One way to the first token of a prompt, or one step of decoding.

    Attributes:
        name: "miss", "hit", the name of a tier, or "decode".
        flops: computed.
        memory_bytes: between the accelerators and their own memory.
        moved_bytes: from a lower tier to the accelerators.
        seconds: predicted.
        intensity: FLOPs per byte of memory.
        bound_by: "compute", "memory", or the tier: what takes longest.
    """

    name: str
    flops: float
    memory_bytes: float
    moved_bytes: float
    seconds: float
    intensity: float
    bound_by: str


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """From where on restoring from a tier beats computing.

    Attributes:
        tier: where the prefix lies.
        bytes_per_second: what comes from there, predicted.
        length: shortest prefix for which that is fast enough; None if none is.
        needed_bytes_per_second: rate from which restoring wins at the length asked about.
    """

    tier: str
    bytes_per_second: float
    length: int | None
    needed_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What of a model and of prefixes the devices hold.

    Attributes:
        weight_bytes: of the model.
        prefix_bytes: of one prefix, with what is copied between devices.
        usable_bytes: of the devices' memory.
        num_prefixes: prefixes that fit beside the weights.
        fits: whether the weights and one whole prompt do.
        needed_devices: the fewest devices on which they would; None if the heads cannot be cut
            finely enough.
    """

    weight_bytes: int
    prefix_bytes: int
    usable_bytes: float
    num_prefixes: int
    fits: bool
    needed_devices: int | None


@dataclass(frozen=True, kw_only=True)
class MissPenalty:
    """All of it, for prompts of `prefix_len` tokens that may be cached and `num_new` that are not.

    Attributes:
        prefix_len, num_new: tokens.
        outcomes: miss, each tier from the farthest to the host, hit, and a decode step.
        break_even: for each tier.
        fit: what the devices hold.
        saved_by_pin: seconds that a pinned prefix saves per hit, by where it would lie otherwise
            ("miss": nowhere).
    """

    prefix_len: int
    num_new: int
    outcomes: tuple[Outcome, ...]
    break_even: tuple[BreakEven, ...]
    fit: Fit
    saved_by_pin: dict[str, float]

    @property
    def by_name(self) -> dict[str, Outcome]:
        return {outcome.name: outcome for outcome in self.outcomes}


def miss_penalty(costs: CostModel, prefix_len: int, num_new: int = 32) -> MissPenalty:
    """Predict what becomes of a prompt with and without its prefix.

    Raises:
        ValueError: a length is no positive integer.
    """
    for name, value in (("prefix_len", prefix_len), ("num_new", num_new)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    total = prefix_len + num_new
    miss = _computed(costs, "miss", 0, total)
    hit = _computed(costs, "hit", prefix_len, total)
    tiers = tuple(reversed(costs.tiers))
    restored = [_restored(costs, tier, hit, prefix_len) for tier in tiers]
    work = costs.decode_work(total)
    decode = _outcome("decode", costs, work, costs.seconds_to_decode(total))
    outcomes = (miss, *restored, hit, decode)
    return MissPenalty(
        prefix_len=prefix_len,
        num_new=num_new,
        outcomes=outcomes,
        break_even=tuple(
            BreakEven(
                tier=tier,
                bytes_per_second=kv_bytes(costs.shape, 1) / costs.seconds_to_restore(tier, 1),
                length=costs.break_even_length(tier, num_new),
                needed_bytes_per_second=costs.break_even_bandwidth(prefix_len, num_new),
            )
            for tier in costs.tiers
        ),
        fit=fit(costs, prefix_len, num_new),
        saved_by_pin={other.name: other.seconds - hit.seconds for other in (miss, *restored)},
    )


def fit(costs: CostModel, prefix_len: int, num_new: int) -> Fit:
    """What of the model and of prefixes of `prefix_len` the devices hold."""

    def needed(num_devices: int) -> float:
        on_device = costs.shape.on_devices(num_devices)
        return on_device.weight_bytes + kv_bytes(on_device, prefix_len + num_new)

    def usable(num_devices: int) -> float:
        return MEMORY_SHARE * costs.hardware.memory_bytes * num_devices

    weights = costs.device_shape.weight_bytes
    one = kv_bytes(costs.device_shape, prefix_len)
    count = costs.num_devices
    return Fit(
        weight_bytes=weights,
        prefix_bytes=one,
        usable_bytes=usable(count),
        num_prefixes=max(int((usable(count) - weights) // one), 0),
        fits=needed(count) <= usable(count),
        needed_devices=next(
            (n for n in costs.shape.device_counts() if needed(n) <= usable(n)), None
        ),
    )


def _computed(costs: CostModel, name: str, num_cached: int, num_tokens: int) -> Outcome:
    work = costs.request_work(num_cached, num_tokens)
    return _outcome(name, costs, work, costs.seconds_to_first_token(num_cached, num_tokens))


def _outcome(name: str, costs: CostModel, work: Any, seconds: float) -> Outcome:
    point = roofline(work, costs.machine)
    return Outcome(
        name=name,
        flops=work.flops,
        memory_bytes=work.num_bytes,
        moved_bytes=0,
        seconds=seconds,
        intensity=point.intensity,
        bound_by=point.bound_by,
    )


def _restored(costs: CostModel, tier: str, hit: Outcome, prefix_len: int) -> Outcome:
    """A hit after its prefix has come back."""
    seconds = costs.seconds_to_restore(tier, prefix_len)
    memory_bytes = hit.memory_bytes + kv_bytes(costs.device_shape, prefix_len)
    return Outcome(
        name=tier,
        flops=hit.flops,
        memory_bytes=memory_bytes,
        moved_bytes=kv_bytes(costs.shape, prefix_len),
        seconds=seconds + hit.seconds,
        intensity=hit.flops / memory_bytes,
        bound_by=tier if seconds > hit.seconds else hit.bound_by,
    )
