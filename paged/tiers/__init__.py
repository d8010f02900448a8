"""Where blocks go that the device has no room for: host memory, disk, a server.

A block of a lower tier is found by a digest of everything that its keys and values depend on, its
namespace and all tokens up to its end, and is checked against its own tokens when it is read. What
is not right is a miss: it is counted, logged in one line, and computed again.
"""

from .disk import DiskTier as DiskTier
from .host import HostTier as HostTier
from .keys import further_keys as further_keys
from .keys import root_key as root_key
from .memory import aligned_empty as aligned_empty
from .remote import RemoteTier as RemoteTier
from .stack import TierStack as TierStack
from .tier import Tier as Tier
from .tier import TierStats as TierStats

__all__ = [
    "DiskTier",
    "HostTier",
    "RemoteTier",
    "Tier",
    "TierStack",
    "TierStats",
    "aligned_empty",
    "further_keys",
    "root_key",
]
