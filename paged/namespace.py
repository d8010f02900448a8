"""Namespaces: everything beside the tokens that changes keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NamespaceKey:
    """What two requests must share, beside tokens, to share blocks.

    Attributes:
        model: fingerprint of the weights and the configuration, RoPE included.
        cache_dtype: data type and quantisation scheme of the cache.
        adapter: adapter id, empty for none.
        adapter_version: changes when the adapter is reloaded.
        salt: a tenant's own secret, empty for the shared cache.
    """

    model: str
    cache_dtype: str
    adapter: str = ""
    adapter_version: int = 0
    salt: str = ""


@dataclass(kw_only=True)
class Namespaces:
    """Small integers for namespace keys, for use in arrays.

    Keys are compared field by field and never concatenated, so no choice of salt can imitate
    another key. The table is the host's; it only grows.
    """

    _ids: dict[NamespaceKey, int] = field(default_factory=dict)

    def id_of(self, key: NamespaceKey) -> int:
        """The id of a key, the same for equal keys and for no others."""
        return self._ids.setdefault(key, len(self._ids))
