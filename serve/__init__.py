"""The engine that serves models with prefix reuse, and the OpenAI-compatible server around it."""

from .adapters import NoAdapterSlot as NoAdapterSlot
from .beam_search import BeamSearchParams as BeamSearchParams
from .cache_snapshot import CacheSnapshot as CacheSnapshot
from .cache_snapshot import EngineBusy as EngineBusy
from .config import EngineConfig as EngineConfig
from .engine import Engine as Engine
from .outputs import Completion as Completion
from .outputs import EngineStats as EngineStats
from .outputs import Logprob as Logprob
from .outputs import RequestOutput as RequestOutput
from .refusals import EngineDraining as EngineDraining
from .sampling_params import InvalidRequest as InvalidRequest
from .sampling_params import SamplingParams as SamplingParams
from .sequence import Branch as Branch
from .sequence import generate_together as generate_together
from .structured_outputs import StructuredOutputs as StructuredOutputs

__all__ = [
    "BeamSearchParams",
    "Branch",
    "CacheSnapshot",
    "Completion",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineDraining",
    "EngineStats",
    "InvalidRequest",
    "Logprob",
    "NoAdapterSlot",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "generate_together",
]
