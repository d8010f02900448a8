"""What an engine compiles, and why: `octavo serve --explain-compile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax

_HIT = "/jax/compilation_cache/cache_hits"

# By the beginning of a program's name.
_WHY = {
    "packed step": "prompts in chunks, beside one token of everybody who decodes",
    "decode loop": "up to max_decode_steps tokens of each of so many sequences",
    "speculative decode loop": "the same, several tokens of each guessed and checked in one step",
    "admit": "match a request against the cache and give it blocks",
    "append": "blocks for the tokens to come",
    "publish": "share the blocks that have filled",
    "release": "give back the blocks of a request that ends",
    "stats": "count the blocks in each state",
    "fork": "let samples and beams share all blocks of another",
    "hold": "keep the blocks of a sequence that stays",
    "copy on write": "give samples and beams a block of their own to write",
    "copy tails": "what those blocks begin with",
    "copy": "blocks of which a request shares only the beginning",
    "pack": "blocks together, on their way to lower tiers",
    "unpack": "blocks from there, where they belong",
    "match": "how much of each waiting request is cached, for the policy lpm",
    "load adapter": "the weights of a LoRA adapter into its slot",
}


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program.

    Attributes:
        name: what it does.
        size: what it is padded to; empty if there is only one of its kind.
        why: what needs it.
        seconds: that compiling or loading it took.
        was_kept: whether it came from the folder of compiled programs.
    """

    name: str
    size: str
    why: str
    seconds: float
    was_kept: bool


def explain_programs(
    warmups: Sequence[tuple[str, Callable[[], object]]], num_loaded_fn: Callable[[], int]
) -> Iterator[ProgramReport]:
    """Compile the programs of `ModelRunner.warmups` one after the other and report each.

    Args:
        warmups: names, and calls that compile.
        num_loaded_fn: how many programs have been loaded whole so far.
    """
    hits = 0

    def listen(event: str, **_: str | int) -> None:
        nonlocal hits
        hits += event == _HIT

    jax.monitoring.register_event_listener(listen)
    try:
        for full_name, compile_fn in warmups:
            before, loaded, begin = hits, num_loaded_fn(), time.perf_counter()
            compile_fn()
            seconds = time.perf_counter() - begin
            name, _, size = full_name.partition(" of ")
            yield ProgramReport(
                name=name,
                size=size,
                why=_why(name),
                seconds=seconds,
                was_kept=hits > before or num_loaded_fn() > loaded,
            )
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _why(name: str) -> str:
    return next((why for start, why in _WHY.items() if name.startswith(start)), "")
