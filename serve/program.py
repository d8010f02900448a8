"""A jitted function whose compiled programs are known one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any

import jax

from .program_store import ProgramStore


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
        self._store: ProgramStore | None = None
        self._executables: dict[int, Callable[..., Any]] = {}
        self._loaded: set[int] = set()

    @property
    def num_sizes(self) -> int:
        """Sizes that it has been compiled or loaded for."""
        return len(self._executables)

    @property
    def num_loaded(self) -> int:
        """Sizes for which a kept program has been loaded, and nothing traced or compiled."""
        return len(self._loaded)

    def keep_in(self, store: ProgramStore | None) -> None:
        """Load programs from `store` where it has them, and keep there what is compiled."""
        self._store = store

    def compile(self, size: int, *args: Any) -> Callable[..., Any]:
        """Compile or load for a size; arrays or `jax.ShapeDtypeStruct`s stand for arguments."""
        executable = self._executables.get(size)
        if executable is None:
            executable = self._executables[size] = self._load(size, args) or self._make(size, args)
        return executable

    def _load(self, size: int, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        executable = self._store.load(self.name, size, args) if self._store else None
        if executable is not None:
            self._loaded.add(size)
        return executable

    def _make(self, size: int, args: tuple[Any, ...]) -> Callable[..., Any]:
        executable = self._jit.lower(*args).compile()
        if self._store:
            self._store.save(self.name, size, args, executable)
        return executable

    def __call__(self, size: int, *args: Any) -> Any:
        """Run for a size, compiling first if that has not been done."""
        return (self._executables.get(size) or self.compile(size, *args))(*args)


@lru_cache(maxsize=128)
def _jit(fn: Callable[..., Any], settings: Hashable, donate: tuple[int, ...]) -> Any:
    # JAX keeps what it has traced and compiled by the identity of what was jitted.
    return jax.jit(fn if settings is None else partial(fn, settings), donate_argnums=donate)
