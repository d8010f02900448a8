"""Sequences that hold their blocks while no request of theirs runs.

Next to the seats of running requests the block tables have spare rows. A hold is such a row: as
long as it stands, its blocks are referenced and stay. Holds give way: when a row, or room for
running requests, is needed, the one that was not used for longest ends. Its blocks are indexed, so
they stay cached until they are evicted like all others, and whoever held them comes back as a hit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable


class Hold:
    """What a kept sequence holds; whoever drops the last reference to it lets go.

    Attributes:
        row: of the block tables, or None.
        num_tokens: tokens in the blocks of that row.
    """

    def __init__(self) -> None:
        self.row: int | None = None
        self.num_tokens = 0


class SpareRows:
    """The rows of the block tables that no running request has.

    Args:
        rows: which these are.
        release_fn: gives back what a row holds, if anything.
    """

    def __init__(self, rows: range, release_fn: Callable[[int], None]):
        self._free = list(rows)
        self._release_fn = release_fn
        # The least recently used first.
        self._holds: dict[int, weakref.ref[Hold]] = {}
        # Rows of holds that have been dropped: the garbage collector may come at any time, so it
        # leaves a note and nothing else.
        self._dropped: deque[int] = deque()

    def take(self, count: int) -> list[int] | None:
        """Rows for `count` sequences that run in them, ending holds if need be; None if too few."""
        while len(self._free) < count and self.give_way():
            pass
        if len(self._free) < count:
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, rows: list[int]) -> None:
        """Rows that were taken are spare again, whatever they held."""
        for row in rows:
            self._release_fn(row)
        self._free += rows

    def row_for(self, hold: Hold, source: Hold | None = None) -> int | None:
        """An empty row for `hold`, which lets go of what it held; None if all rows are in use.

        `source` does not end for it, and counts as used.
        """
        self.let_go(hold)
        row = None if source is None else source.row
        kept = None if row is None else self._holds.pop(row)
        try:
            rows = self.take(1)
        finally:
            if row is not None and kept is not None:
                self._holds[row] = kept
        if rows is None:
            return None
        [hold.row] = rows
        dropped = self._dropped
        self._holds[hold.row] = weakref.ref(hold, lambda _, row=hold.row: dropped.append(row))
        return hold.row

    def let_go(self, hold: Hold) -> None:
        """End a hold, if it holds anything."""
        row, hold.row, hold.num_tokens = hold.row, None, 0
        if row is not None:
            del self._holds[row]
            self.give_back([row])
        self.sweep()

    def sweep(self) -> None:
        """End the holds of which nobody knows any more."""
        while self._dropped:
            row = self._dropped.popleft()
            if row in self._holds and self._holds[row]() is None:
                del self._holds[row]
                self.give_back([row])

    def end_all(self) -> None:
        """End all holds."""
        while self.give_way():
            pass

    def give_way(self) -> bool:
        """End the hold that was not used for longest; False if there is none."""
        if self._dropped:
            self.sweep()
            return True
        if not self._holds:
            return False
        oldest = self._holds[next(iter(self._holds))]()
        if oldest is not None:
            self.let_go(oldest)
        else:
            self.sweep()
        return True
