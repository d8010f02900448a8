"""A jitted function whose compiled programs are known one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax


class Program:
    """A function compiled once for each size that it is called with.

    `jax.jit` compiles when it meets new shapes, silently and in the middle of a request. Here a
    caller names the size, can compile it ahead (from several threads at once, without running
    it), and can count what there is. Engines of one process that are alike share what is compiled.

    Args:
        name: for people.
        fn: the function; all its shapes follow from the size and `settings`.
        donate: positions of the arguments that it may overwrite.
        settings: what else it depends on, compared by value; unless None, `fn`'s first argument,
            which `donate` does not count.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        donate: tuple[int, ...],
        settings: Hashable = None,
    ):
        self.name = name
        self._jit = _jit(fn, settings, donate)
        self._executables: dict[int, Callable[..., Any]] = {}

    @property
    def num_sizes(self) -> int:
        """Sizes that it has been compiled for."""
        return len(self._executables)

    def compile(self, size: int, *args: Any) -> Callable[..., Any]:
        """Compile for a size; arrays or `jax.ShapeDtypeStruct`s stand for the arguments."""
        executable = self._executables.get(size)
        if executable is None:
            executable = self._jit.lower(*args).compile()
            self._executables[size] = executable
        return executable

    def __call__(self, size: int, *args: Any) -> Any:
        """Run for a size, compiling first if that has not been done."""
        return (self._executables.get(size) or self.compile(size, *args))(*args)


@lru_cache(maxsize=128)
def _jit(fn: Callable[..., Any], settings: Hashable, donate: tuple[int, ...]) -> Any:
    # JAX keeps what it has traced and compiled by the identity of what was jitted.
    return jax.jit(fn if settings is None else partial(fn, settings), donate_argnums=donate)


def keep_compiled_programs(folder: str) -> None:
    """Keep compiled programs in `folder` between runs of this process's user; '' for nowhere."""
    # Whoever has chosen a folder for this process keeps it.
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or chosen:
        return
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
