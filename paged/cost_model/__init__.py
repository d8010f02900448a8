"""What prefill, hits, restores and decoding cost: FLOPs, bytes and seconds.

From the sizes of a model (`ModelShape`, `MODEL_SHAPES`) and of a machine (`Hardware`, `HARDWARE`,
`calibrate`). All of it is host arithmetic on Python numbers or NumPy arrays.

    >>> shape = model_shape("llama-3.1-70b")
    >>> kv_bytes(shape, 1)
    327680
    >>> whole = prefill_flops(shape, 0, 131_072)
    >>> round(prefill_flops(shape, 130_048, 131_072) / whole, 3)  # the last 1,024 tokens of it
    0.012
"""

from .calibration import calibrate as calibrate
from .data_sheets import HARDWARE as HARDWARE
from .fitting import fit_hits as fit_hits
from .fitting import fit_prefill as fit_prefill
from .fitting import fit_restore as fit_restore
from .hardware import TIERS as TIERS
from .hardware import Efficiency as Efficiency
from .hardware import Hardware as Hardware
from .model import CostModel as CostModel
from .penalty import MissPenalty as MissPenalty
from .penalty import miss_penalty as miss_penalty
from .presets import MODEL_SHAPES as MODEL_SHAPES
from .presets import model_shape as model_shape
from .restoring import RestorePlan as RestorePlan
from .restoring import plan_restore as plan_restore
from .seconds import RooflinePoint as RooflinePoint
from .seconds import prefill_seconds as prefill_seconds
from .seconds import roofline as roofline
from .seconds import work_seconds as work_seconds
from .shape import ModelShape as ModelShape
from .work import Work as Work
from .work import attention_flops as attention_flops
from .work import cost_slope as cost_slope
from .work import decode_work as decode_work
from .work import head_work as head_work
from .work import kv_bytes as kv_bytes
from .work import prefill_flops as prefill_flops
from .work import prefill_work as prefill_work

__all__ = [
    "HARDWARE",
    "MODEL_SHAPES",
    "TIERS",
    "CostModel",
    "Efficiency",
    "Hardware",
    "MissPenalty",
    "ModelShape",
    "RestorePlan",
    "RooflinePoint",
    "Work",
    "attention_flops",
    "calibrate",
    "cost_slope",
    "decode_work",
    "fit_hits",
    "fit_prefill",
    "fit_restore",
    "head_work",
    "kv_bytes",
    "miss_penalty",
    "model_shape",
    "plan_restore",
    "prefill_flops",
    "prefill_seconds",
    "prefill_work",
    "roofline",
    "work_seconds",
]
