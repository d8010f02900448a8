"""Which implementation of an op runs, in one place for all ops."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .chips import UnsupportedChip, current_platform

logger = logging.getLogger(__name__)

REFERENCE = "reference"
XLA = "xla"
NUMBA = "numba"
MOSAIC_GPU = "mosaic_gpu"
MOSAIC_TPU = "mosaic_tpu"
_ORDER = {"cpu": (NUMBA, XLA), "gpu": (MOSAIC_GPU, XLA), "tpu": (MOSAIC_TPU, XLA)}


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op's implementations by name, and the order in which a platform tries them.

    Every implementation has the op's signature. One that cannot serve a call raises
    `NotImplementedError`, and the next in the platform's order is tried.

    Attributes:
        name: the op's public name, for messages.
        implementations: name -> function.
        order: platform ("cpu", "gpu", "tpu") -> names, best first; XLA on any other.
    """

    name: str
    implementations: Mapping[str, Callable[..., Any]]
    order: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _ORDER)

    def __call__(self, implementation: str | None, /, *args: Any, **kwargs: Any) -> Any:
        """Run the named implementation, or the platform's best when it is None.

        Raises:
            ValueError: there is no implementation of that name.
            NotImplementedError: the named one, or every one of the platform's, cannot serve
                this call. A named implementation never falls back.
        """
        if implementation is not None:
            fn = self.implementations.get(implementation)
            if fn is None:
                known = ", ".join(sorted(self.implementations))
                raise ValueError(f"{self.name} has no {implementation=}; expected one of {known}")
            return fn(*args, **kwargs)
        platform = current_platform()
        refused: list[str] = []
        for name in self.order.get(platform, (XLA,)):
            if name not in self.implementations:
                continue
            try:
                return self.implementations[name](*args, **kwargs)
            except UnsupportedChip as error:
                refused.append(f"{name}: {error}")
                _warn_once(f"{error}: plain XLA serves instead")
            except NotImplementedError as error:
                refused.append(f"{name}: {error}")
                logger.info("%s: %s cannot serve this call: %s", self.name, name, error)
        raise NotImplementedError(
            f"{self.name}: nothing serves this call on {platform}: {'; '.join(refused)}"
        )
