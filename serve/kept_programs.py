"""Where compiled programs are kept between runs: whole, or in JAX's own cache."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from ..models import Llama
from ..pallas_kernels import cpu_kernels
from .config import EngineConfig
from .layout import cache_dtype
from .program_store import ProgramStore, jax_cache

# What no program depends on.
_OTHER_SETTINGS = (
    *("compilation_cache_dir", "max_waiting", "max_setbacks", "decode_slice_ms"),
    *("host_cache_gib", "disk_cache_dir", "disk_cache_gib", "remote_cache_url", "restore_policy"),
)


def keep_compiled_programs(config: EngineConfig, model: Llama) -> ProgramStore | None:
    """Keep compiled programs between runs of this process's user, if the configuration says where.

    Returns:
        The store for them; None where that is left to JAX's own cache.
    """
    if model.dtype == jnp.float32:
        # What a kept program calls must be known before it is loaded.
        cpu_kernels(cache_dtype(config, model.dtype).name)
    # Whoever has chosen a folder of JAX's for this process keeps it.
    if not config.compilation_cache_dir or jax_cache():
        return None
    path = Path(config.compilation_cache_dir).expanduser()
    # Elsewhere than on CPUs nobody has tried to load whole programs. And their key knows no code
    # but octavo's own: somebody else's layers may compute anything.
    if jax.default_backend() == "cpu" and _is_ours(model):
        settings = {k: v for k, v in vars(config).items() if k not in _OTHER_SETTINGS}
        # Its parameters' structure, which says how they are packed and multiplied.
        structure = str(jax.tree.structure(nnx.state(model)))
        return ProgramStore(path / "whole", model.config, structure, settings)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None


def _is_ours(model: Llama) -> bool:
    known = {__name__.partition(".")[0], "flax", "jax", "jaxlib", "builtins"}
    nodes = nnx.iter_graph(model)
    return all(type(node).__module__.partition(".")[0] in known for _, node in nodes)
