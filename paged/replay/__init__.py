"""What-if replay: a request log through the block manager, under many policies and capacities.

`read_trace` makes a `Trace` of a log, `replay_policies` says which blocks each request would have
found, `make_report` turns that into figures beside those of the offline optimum, and
`make_tier_report` into those of host memory and a disk below.
"""

from .optimum import optimum_hits as optimum_hits
from .optimum import unlimited_hits as unlimited_hits
from .program import replay_policies as replay_policies
from .reading import TraceError as TraceError
from .reading import read_trace as read_trace
from .report import ReplayResult as ReplayResult
from .report import default_capacities as default_capacities
from .report import make_report as make_report
from .tier_report import TierResult as TierResult
from .tier_report import make_tier_report as make_tier_report
from .trace import Trace as Trace
from .trace import TraceBuilder as TraceBuilder

__all__ = [
    "ReplayResult",
    "TierResult",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "default_capacities",
    "make_report",
    "make_tier_report",
    "optimum_hits",
    "read_trace",
    "replay_policies",
    "unlimited_hits",
]
