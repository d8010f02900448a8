"""The slots for adapters on device, and what is in them.

Invariants:
1. A slot is overwritten only while no loaded adapter and no request has it: a request ends with the
   weights that it began with, whatever is loaded and unloaded meanwhile. Who has which is looked
   up among the requests when a slot is wanted, so there is no count to go wrong.
2. A name stands for one version at a time, and versions are digests of the weights: what has been
   cached with other weights is never found under the same name, and with equal ones it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..models import LlamaConfig, LoraAdapter
from ..models.lora import LoraStack, init_lora, place_lora
from .program import Program
from .sampling_params import InvalidRequest


class NoAdapterSlot(RuntimeError):
    """Every slot has an adapter that is loaded, or that a request still runs with."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A version of an adapter in its slot.

    Attributes:
        name: what requests call it.
        version: digest of its weights.
        slot: where its weights are, from 1.
    """

    name: str
    version: str
    slot: int


class Adapters:
    """The adapters of one model.

    Attributes:
        stack: the weights of all slots; None without any.
        leaves: the arrays in `stack`.
        place: the program that fills a slot.
    """

    def __init__(self, model: LlamaConfig, *, num_slots: int, rank: int, dtype: DTypeLike):
        self._model, self._dtype = model, dtype
        self._num_slots, self._rank = num_slots, rank
        self._by_name: dict[str, Adapter] = {}
        self.place = Program("load adapter", place_lora, donate=(0,))
        empty = init_lora(model, num_slots=num_slots, rank=rank, dtype=dtype) if num_slots else None
        self._hold(empty)

    def _hold(self, stack: LoraStack | None) -> None:
        self.stack = stack
        self.leaves: list[jax.Array] = jax.tree.leaves(stack)

    @property
    def loaded(self) -> Collection[Adapter]:
        """Those that requests may name, oldest first."""
        return tuple(self._by_name.values())

    def named(self, name: str | None) -> Adapter | None:
        """The adapter that a request asks for, None for none.

        Raises:
            InvalidRequest: it is not loaded.
        """
        if name is None:
            return None
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            message = f"adapter {name!r:.100} is not loaded; loaded: {known}"
            raise InvalidRequest(message, param="adapter")
        return found

    def load(self, name: str, weights: LoraAdapter, in_use: Iterable[Adapter]) -> Adapter:
        """Put an adapter into a slot, under a name that may stand for another until now.

        Args:
            name: what requests will call it.
            weights: what it does.
            in_use: the adapters of requests that wait or run.

        Raises:
            NoAdapterSlot: there is no slot for it.
            ValueError: it does not fit this engine. Nothing has changed in either case.
        """
        before = self._by_name.get(name)
        if before is not None and before.version == weights.digest:
            return before
        if not name:
            raise ValueError("the name of an adapter must not be empty")
        if weights.config != self._model:
            raise ValueError(f"adapter {name!r} is for a model of another configuration")
        if self._num_slots and weights.rank > self._rank:
            raise ValueError(
                f"adapter {name!r} has rank {weights.rank}; this engine takes up to "
                f"max_lora_rank={self._rank}"
            )
        slot = self._free_slot(before, in_use)
        new = weights.stack(rank=self._rank, dtype=self._dtype)
        self._hold(self.place(1, self.stack, new, np.int32(slot - 1)))
        self._by_name[name] = Adapter(name=name, version=weights.digest, slot=slot)
        return self._by_name[name]

    def unload(self, name: str) -> None:
        """Forget a name; requests that have begun go on.

        Raises:
            InvalidRequest: it is not loaded.
        """
        self.named(name)
        del self._by_name[name]

    def _free_slot(self, replaced: Adapter | None, in_use: Iterable[Adapter]) -> int:
        taken = {adapter.slot for adapter in in_use}
        taken |= {adapter.slot for adapter in self.loaded if adapter is not replaced}
        for slot in range(1, self._num_slots + 1):
            if slot not in taken:
                return slot
        if not self._num_slots:
            raise NoAdapterSlot("this engine takes no adapters: set max_loras")
        loaded = ", ".join(repr(adapter.name) for adapter in self.loaded)
        raise NoAdapterSlot(
            f"all {self._num_slots} adapter slots are taken; loaded: {loaded or 'none'}. Unload "
            "one, wait for the requests that still run with an old one, or set a larger max_loras"
        )

    def warmups(self) -> list[tuple[str, Callable[[], object]]]:
        """The program by name with a call that compiles it, if there are slots."""
        return [(self.place.name, self._compile)] if self._num_slots else []

    def _compile(self) -> None:
        nothing = LoraAdapter(config=self._model, layers=({},) * self._model.num_layers)
        arrays = nothing.stack(rank=self._rank, dtype=jnp.dtype(self._dtype))
        self.place.compile(1, self.stack, arrays, np.int32(0))
