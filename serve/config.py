"""How an engine is set up."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ..paged import POLICIES
from .scheduler import POLICIES as SCHEDULING_POLICIES

# Types that are taken, what makes plain ones of them, and what to expect.
_KINDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any], str]] = {
    "bool": (bool, bool, "True or False"),
    "int": (numbers.Integral, int, "an integer"),
    "float": (numbers.Real, float, "a finite number"),
    "str": ((str, os.PathLike), os.fspath, "a string"),
}


def _knob(default: Any, text: str, *, repr: bool = True) -> Any:
    return field(default=default, repr=repr, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The knobs of an engine; the command line is derived from them.

    Raises:
        ValueError: a value is out of range, naming it.
    """

    block_size: int = _knob(16, "tokens per KV-cache block")
    kv_cache_gib: float = _knob(2.0, "memory for the KV cache, in GiB")
    num_blocks: int | None = _knob(None, "blocks in the KV cache, instead of kv-cache-gib")
    kv_cache_dtype: str = _knob("auto", "auto (the model's), float32 or bfloat16")
    max_model_len: int | None = _knob(None, "longest context served; the model's own if not given")
    max_num_seqs: int = _knob(32, "sequences computed at once")
    max_num_batched_tokens: int = _knob(512, "tokens computed in one step")
    enable_prefix_caching: bool = _knob(True, "share blocks between requests with equal prefixes")
    enable_cascade_attention: bool = _knob(
        True, "while decoding, read a prefix that several sequences share once for all of them"
    )
    num_speculative_tokens: int = _knob(
        0, "tokens guessed from the text so far and checked in one decode step; 0 for none"
    )
    max_speculative_seqs: int = _knob(4, "with more sequences than this decoding none is guessed")
    deterministic: bool | None = _knob(
        None,
        "same logits to the bit, whatever was cached or runs beside (CPU only); "
        "if not given, where it costs no time or tokens would depend on it",
    )
    eviction_policy: str = _knob(
        "cost", f"which cached blocks go first when room is needed: {', '.join(POLICIES)}"
    )
    max_pinned_fraction: float = _knob(0.5, "part of the KV cache that may be pinned, at most")
    scheduling_policy: str = _knob(
        "fcfs", "who starts first: fcfs, priority (of the request) or lpm (longest prefix match)"
    )
    max_setbacks: int = _knob(
        64, "later requests that may start before a waiting one, and times that it is preempted"
    )
    max_waiting: int = _knob(8192, "waiting requests above which the server takes no new ones")
    max_loras: int = _knob(0, "LoRA adapters loaded at once, at most; 0 leaves them out")
    max_lora_rank: int = _knob(16, "largest rank of an adapter")
    max_decode_steps: int = _knob(16, "decode steps in one dispatch, at most")
    decode_slice_ms: float = _knob(
        100.0, "time that one dispatch of decode steps aims at; a new request waits about as long"
    )
    async_scheduling: bool | None = _knob(
        None,
        "dispatch the next decode steps before the tokens of the last ones are read; "
        "if not given, where the device is not the host's CPU",
    )
    host_cache_gib: float = _knob(
        0.0, "host memory for blocks that the KV cache has no room for, in GiB; 0 for none"
    )
    disk_cache_dir: str = _knob("", "folder for blocks that outlive the process; '' for none")
    disk_cache_gib: float = _knob(16.0, "what that folder may hold, in GiB; 0 for nothing")
    remote_cache_url: str = _knob(
        "",
        "Valkey or Redis server for blocks that engines share, redis://HOST:PORT/DB; '' for none",
        repr=False,  # it may hold a password
    )
    restore_policy: str = _knob(
        "cost",
        "whether blocks below the KV cache are restored: cost (where that is predicted to take "
        "less time than computing them) or always",
    )
    compilation_cache_dir: str = _knob(
        "~/.cache/octavo/compiled", "where compiled programs are kept between runs; '' for nowhere"
    )

    def __post_init__(self) -> None:
        for own in fields(self):
            value = _of_kind(own.name, str(own.type), getattr(self, own.name))
            object.__setattr__(self, own.name, value)
        at_least_one = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_decode_steps")
        for name in (
            *at_least_one,
            "max_model_len",
            "max_setbacks",
            "max_waiting",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("num_speculative_tokens", "max_speculative_seqs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("host_cache_gib", "disk_cache_gib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.has_lower_tiers and not self.enable_prefix_caching:
            raise ValueError(
                "host_cache_gib, disk_cache_dir and remote_cache_url keep blocks that are shared: "
                "they need enable_prefix_caching"
            )
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 2")
        if self.max_loras < 0:
            raise ValueError(f"max_loras={self.max_loras} must be at least 0")
        for name in ("kv_cache_gib", "decode_slice_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.kv_cache_dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} must be auto, float32 or bfloat16"
            )
        if self.eviction_policy not in POLICIES:
            raise ValueError(
                f"eviction_policy={self.eviction_policy!r} must be one of {', '.join(POLICIES)}"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"scheduling_policy={self.scheduling_policy!r} must be one of "
                f"{', '.join(SCHEDULING_POLICIES)}"
            )
        if self.restore_policy not in ("cost", "always"):
            raise ValueError(f"restore_policy={self.restore_policy!r} must be cost or always")
        if not 0 <= self.max_pinned_fraction <= 1:
            raise ValueError(f"max_pinned_fraction={self.max_pinned_fraction} must be in [0, 1]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running sequence decodes in a step"
            )

    @property
    def has_disk_cache(self) -> bool:
        """Whether blocks are kept on disk."""
        return bool(self.disk_cache_dir and self.disk_cache_gib)

    @property
    def has_lower_tiers(self) -> bool:
        """Whether blocks are kept anywhere below the device."""
        return self.host_cache_gib > 0 or self.has_disk_cache or bool(self.remote_cache_url)


def _of_kind(name: str, annotation: str, value: Any) -> object:
    """The value as plain Python has it, whichever library's number or path it is."""
    kind, *others = annotation.split(" | ")
    if value is None and others:
        return None
    types, plain_fn, expected = _KINDS[kind]
    fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    if not fits or (isinstance(value, numbers.Real) and not math.isfinite(value)):
        raise ValueError(f"{name}={value!r:.80} must be {expected}")
    return plain_fn(value)
