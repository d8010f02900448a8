"""Paged memory and a prefix index as pure functions on immutable arrays.

See `octavo.paged.cache` for the operations and a worked example, `octavo.paged.sharing` for beam
search and parallel sampling.
"""

from .advice import Advice as Advice
from .advice import advise as advise
from .attention import cached_attention as cached_attention
from .batch import PagedBatch as PagedBatch
from .batch import packed_batch as packed_batch
from .batch import token_positions as token_positions
from .batch import token_slots as token_slots
from .cache import Admission as Admission
from .cache import BlockCopies as BlockCopies
from .cache import CacheStats as CacheStats
from .cache import admit as admit
from .cache import append as append
from .cache import namespace_use as namespace_use
from .cache import reserve as reserve
from .cache import stats as stats
from .cache import unfilled_slots as unfilled_slots
from .errors import InvariantViolation as InvariantViolation
from .errors import OutOfBlocks as OutOfBlocks
from .errors import PinBudgetExceeded as PinBudgetExceeded
from .eviction import POLICIES as POLICIES
from .eviction import EvictionPolicy as EvictionPolicy
from .eviction import eviction_policy as eviction_policy
from .explain import Explanation as Explanation
from .explain import explain as explain
from .index import PrefixIndex as PrefixIndex
from .index import longest_child as longest_child
from .index import match as match
from .invariants import check_invariants as check_invariants
from .manager import Admitted as Admitted
from .manager import BlockManager as BlockManager
from .namespace import NamespaceKey as NamespaceKey
from .namespace import Namespaces as Namespaces
from .pins import pin_namespace as pin_namespace
from .pins import pin_sequence as pin_sequence
from .pins import pin_tokens as pin_tokens
from .pins import unpin_namespace as unpin_namespace
from .pins import unpin_tokens as unpin_tokens
from .pool import BlockPool as BlockPool
from .pool import allocate as allocate
from .pool import decref as decref
from .pool import incref as incref
from .pool import init_pool as init_pool
from .publish import FilledBlocks as FilledBlocks
from .publish import publish as publish
from .reset import reset_cache as reset_cache
from .shared_prefixes import shared_prefixes as shared_prefixes
from .sharing import copy_on_write as copy_on_write
from .sharing import fork as fork
from .sharing import release as release
from .sharing import truncate as truncate
from .state import FOREVER as FOREVER
from .state import CacheState as CacheState
from .state import Counters as Counters
from .state import acting as acting
from .state import init_cache as init_cache
from .tables import BlockTables as BlockTables
from .tables import init_tables as init_tables

__all__ = [
    "FOREVER",
    "POLICIES",
    "Admission",
    "Admitted",
    "Advice",
    "BlockCopies",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "CacheState",
    "CacheStats",
    "Counters",
    "EvictionPolicy",
    "Explanation",
    "FilledBlocks",
    "InvariantViolation",
    "NamespaceKey",
    "Namespaces",
    "OutOfBlocks",
    "PagedBatch",
    "PinBudgetExceeded",
    "PrefixIndex",
    "acting",
    "admit",
    "advise",
    "allocate",
    "append",
    "cached_attention",
    "check_invariants",
    "copy_on_write",
    "decref",
    "eviction_policy",
    "explain",
    "fork",
    "incref",
    "init_cache",
    "init_pool",
    "init_tables",
    "longest_child",
    "match",
    "namespace_use",
    "packed_batch",
    "pin_namespace",
    "pin_sequence",
    "pin_tokens",
    "publish",
    "release",
    "reserve",
    "reset_cache",
    "shared_prefixes",
    "stats",
    "token_positions",
    "token_slots",
    "truncate",
    "unfilled_slots",
    "unpin_namespace",
    "unpin_tokens",
]
