"""The whole of an engine's cache, kept aside."""

from __future__ import annotations

from dataclasses import dataclass

from ..paged import CacheState, Namespaces
from .programs import KVCache


class EngineBusy(RuntimeError):
    """Requests wait or run, and what was asked needs an idle engine: `drain` it, or cancel them."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CacheSnapshot:
    """What `Engine.cache_snapshot` made; for `Engine.restore_cache` of the same engine.

    It holds copies, as large as the cache itself, because the engine overwrites its own arrays.

    Attributes:
        weights_id: of the engine and the weights that computed what is cached.
        state: of the block manager.
        kv_cache: keys and values.
        namespaces: ids of what may be shared.
    """

    weights_id: object
    state: CacheState
    kv_cache: KVCache
    namespaces: Namespaces
