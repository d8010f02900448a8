"""Paged-attention ops on plain arrays, for GPU, TPU and CPU.

Every op takes `implementation=None` (the platform's best) or a name, which never falls back.
See `octavo.pallas_kernels.layout` for the cache layout they share.
"""

from .chips import CHIPS as CHIPS
from .chips import Chip as Chip
from .chips import Interpretation as Interpretation
from .chips import interpret_kernels as interpret_kernels
from .copy_blocks import copy_blocks as copy_blocks
from .cpu_kernels import cpu_kernels as cpu_kernels
from .gather_blocks import gather_blocks as gather_blocks
from .gather_blocks import scatter_blocks as scatter_blocks
from .layout import NULL_BLOCK as NULL_BLOCK
from .layout import cache_shape as cache_shape
from .layout import debug_checks as debug_checks
from .layout import init_kv_cache as init_kv_cache
from .layout import row_width as row_width
from .linear import linear as linear
from .linear import pack_weight as pack_weight
from .linear.packed import PackedWeight as PackedWeight
from .merge_states import merge_states as merge_states
from .paged_attention import paged_attention as paged_attention
from .quantise import kv_scales as kv_scales
from .shared_prefix_attention import SharedPrefixes as SharedPrefixes
from .shared_prefix_attention import shared_prefix_attention as shared_prefix_attention
from .tuning import Tuning as Tuning
from .tuning import kernel_tuning as kernel_tuning
from .write_kv import write_kv as write_kv

__all__ = [
    "CHIPS",
    "NULL_BLOCK",
    "Chip",
    "Interpretation",
    "PackedWeight",
    "SharedPrefixes",
    "Tuning",
    "cache_shape",
    "copy_blocks",
    "cpu_kernels",
    "debug_checks",
    "gather_blocks",
    "init_kv_cache",
    "interpret_kernels",
    "kernel_tuning",
    "kv_scales",
    "linear",
    "merge_states",
    "pack_weight",
    "paged_attention",
    "row_width",
    "scatter_blocks",
    "shared_prefix_attention",
    "write_kv",
]
