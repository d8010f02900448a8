"""Paged memory and a prefix index as pure functions on immutable arrays.

See `octavo.paged.cache` for the operations and a worked example.
"""

from .batch import PagedBatch as PagedBatch
from .batch import token_positions as token_positions
from .batch import token_slots as token_slots
from .cache import Admission as Admission
from .cache import CacheState as CacheState
from .cache import CacheStats as CacheStats
from .cache import FilledBlocks as FilledBlocks
from .cache import admit as admit
from .cache import append as append
from .cache import init_cache as init_cache
from .cache import publish as publish
from .cache import release as release
from .cache import reserve as reserve
from .cache import stats as stats
from .errors import InvariantViolation as InvariantViolation
from .errors import OutOfBlocks as OutOfBlocks
from .index import PrefixIndex as PrefixIndex
from .index import match as match
from .invariants import check_invariants as check_invariants
from .namespace import NamespaceKey as NamespaceKey
from .namespace import Namespaces as Namespaces
from .pool import BlockPool as BlockPool
from .pool import allocate as allocate
from .pool import decref as decref
from .pool import incref as incref
from .pool import init_pool as init_pool
from .tables import BlockTables as BlockTables
from .tables import init_tables as init_tables

__all__ = [
    "Admission",
    "BlockPool",
    "BlockTables",
    "CacheState",
    "CacheStats",
    "FilledBlocks",
    "InvariantViolation",
    "NamespaceKey",
    "Namespaces",
    "OutOfBlocks",
    "PagedBatch",
    "PrefixIndex",
    "admit",
    "allocate",
    "append",
    "check_invariants",
    "decref",
    "incref",
    "init_cache",
    "init_pool",
    "init_tables",
    "match",
    "publish",
    "release",
    "reserve",
    "stats",
    "token_positions",
    "token_slots",
]
