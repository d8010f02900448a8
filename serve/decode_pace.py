"""How many decode steps one dispatch takes."""

from __future__ import annotations


class DecodePace:
    """Learns how long a decode step takes, so that nobody new waits much longer than a slice.

    Args:
        slice_ms: time that one dispatch aims at.
        max_steps: steps in one dispatch, at most.
    """

    def __init__(self, slice_ms: float, max_steps: int):
        self._slice_seconds = slice_ms / 1000
        self._max_steps = max_steps
        self._step_seconds: dict[int, float] = {}

    def num_steps(self, num_running: int) -> int:
        """Steps that fill one slice with so many sequences; 1 until that has been timed."""
        seconds = self._step_seconds.get(num_running)
        if seconds is None:
            return 1
        return max(1, min(int(self._slice_seconds / seconds), self._max_steps))

    def note(self, num_running: int, seconds: float) -> None:
        """A step with so many sequences took `seconds`."""
        before = self._step_seconds.get(num_running, seconds)
        self._step_seconds[num_running] = 0.5 * before + 0.5 * seconds
