"""What keeps an engine from waiting again and again for something that does not work."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)


class Breaker:
    """Open after a failure; a few seconds later it may be tried again, and closes if that works.

    Args:
        complaint: what to log when it opens, once until it has been closed.
        pause_s: seconds that it is left alone after each failure.
    """

    def __init__(self, complaint: str, pause_s: float):
        self._complaint = complaint
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self.is_open = False

    @property
    def may_try(self) -> bool:
        """Whether it is closed, or the pause is over."""
        return not self.is_open or time.monotonic() >= self._retry_at

    def failed(self, reason: object) -> None:
        """Open it, or leave it open for longer."""
        with self._lock:
            was_open, self.is_open = self.is_open, True
            self._retry_at = time.monotonic() + self._pause_s
        if not was_open:
            logger.warning("%s: %s", self._complaint, reason)

    def worked(self) -> None:
        """Close it."""
        self.is_open = False
