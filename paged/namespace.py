"""Namespaces: everything beside the tokens that changes keys and values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamespaceKey:
    """What two requests must share, beside tokens, to share blocks.

    Attributes:
        model: fingerprint of the weights and the configuration, RoPE included.
        cache_dtype: data type and quantisation scheme of the cache.
        adapter: what the adapter is called, empty for none.
        adapter_version: digest of the adapter's weights, empty for none.
        salt: a tenant's own secret, empty for the shared cache.
    """

    model: str
    cache_dtype: str
    adapter: str = ""
    adapter_version: str = ""
    salt: str = ""


class Namespaces:
    """Small integers for namespace keys, for use in arrays.

    Keys are compared field by field and never concatenated, so no choice of salt can imitate
    another key. The table is the host's and bounded: a key that is forgotten, because
    `max_keys` others were used since, gets a new id when it returns and finds nothing cached.

    Raises:
        ValueError: `max_keys` is less than 1.
    """

    def __init__(self, *, max_keys: int = 1 << 16):
        if max_keys < 1:
            raise ValueError(f"{max_keys=} must be at least 1")
        self._max_keys = max_keys
        self._ids: dict[NamespaceKey, int] = {}
        self._next_id = 0

    def id_of(self, key: NamespaceKey) -> int:
        """The id of a key, the same for equal keys and for no others."""
        found = self._ids.pop(key, None)
        if found is None:
            found, self._next_id = self._next_id, self._next_id + 1
        # Last in a dict is most recently used.
        self._ids[key] = found
        if len(self._ids) > self._max_keys:
            del self._ids[next(iter(self._ids))]
        return found
