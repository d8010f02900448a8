"""What users may ask of an engine's cache, and do to it: explain, pin, reset, keep aside."""

from __future__ import annotations

import copy
import math
import time
import weakref
from dataclasses import replace

import numpy as np

from ..models import LoadedModel
from ..paged import FOREVER, Explanation, PinBudgetExceeded
from .cache_snapshot import CacheSnapshot, EngineBusy
from .intake import Intake, Prompt
from .request import Request
from .runner import ModelRunner
from .sampling_params import InvalidRequest

# Requests by number, to say for whom something was evicted.
_OWNERS_REMEMBERED = 1 << 14


class CacheControl:
    """An engine's cache as its users see it; the engine says for whom it acts."""

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, intake: Intake):
        self.loaded = loaded
        self._runner = runner
        self._intake = intake
        self._weights_id = object()  # another one for other weights
        self._started = time.monotonic()
        self._owners: dict[int, str] = {}
        # Their threads know nothing of the engine, so that they end with it, closed or not.
        tiers = runner.tiers
        self._closer = None if tiers is None else weakref.finalize(self, tiers.close)

    def close(self) -> None:
        """Store what is on its way to tiers below the device, and end their threads.

        Without it that happens when the engine is dropped. The engine goes on, without new blocks
        in those tiers.
        """
        if self._closer is not None:
            self._closer()

    def explain(
        self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None
    ) -> Explanation:
        """Why a prompt would hit the cache as far as it does, and no further.

        Times are seconds since the engine was made; `evicted_for` names the request for which
        room was made, None for room that running requests needed to grow.

        Raises:
            InvalidRequest: the prompt could never be served.
        """
        tokens, namespace = self._intake.prompt(prompt, cache_salt, adapter)
        told = self._runner.explain(tokens, namespace)
        if told.evicted_for is not None:
            told = replace(told, evicted_for=self._owners.get(int(told.evicted_for)))
        if self._runner.tiers is not None:
            key = self._intake.namespace_key(cache_salt, adapter)
            more = self._runner.tiers.num_held(key, tokens, told.num_cached_tokens)
            told = replace(told, num_tier_tokens=more)
        return told

    def pin(
        self,
        prompt: Prompt,
        *,
        cache_salt: str = "",
        ttl_seconds: float | None = None,
        adapter: str | None = None,
    ) -> int:
        """Keep the cached blocks of a prompt from being evicted; returns the tokens in them.

        What the device has not got, or has no budget for, is kept by the roomiest tier below it,
        half of which may be pinned: it is restored when it is wanted, and never computed again.

        Args:
            prompt: text, or token ids; what is not cached yet is not pinned: generate first.
            cache_salt: as of the requests that computed it.
            ttl_seconds: for how long; None means until `unpin`.
            adapter: as of the requests that computed it.

        Raises:
            InvalidRequest: the prompt could never be served, or the time is not positive.
            PinBudgetExceeded: `max_pinned_fraction` of the cache is pinned, and no tier below has
                them and room; nothing has changed.
        """
        tokens, namespace = self._intake.prompt(prompt, cache_salt, adapter)
        if ttl_seconds is not None and not ttl_seconds > 0:
            raise InvalidRequest(f"{ttl_seconds=} must be positive", param="ttl_seconds")
        self._acting(None)
        end = time.monotonic() + (ttl_seconds or math.inf)
        until = math.ceil(min(end - self._started, FOREVER))
        refused, pinned = None, 0
        try:
            pinned = self._runner.pin(tokens, namespace, until)
        except PinBudgetExceeded as error:
            refused = error
        keys, size = self._tier_keys(tokens, cache_salt, adapter), self._runner.layout.shape[2]
        if self._runner.tiers is not None and len(keys) * size > pinned:
            pinned = max(pinned, self._runner.tiers.stack.pin(keys, end) * size)
        if refused is not None and not pinned:
            raise refused
        return pinned

    def unpin(self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None) -> None:
        """End the pins of a prompt's blocks, but for those under which others are pinned.

        Raises:
            InvalidRequest: the prompt could never be served.
        """
        tokens, namespace = self._intake.prompt(prompt, cache_salt, adapter)
        self._runner.unpin(tokens, namespace)
        if self._runner.tiers is not None:
            self._runner.tiers.stack.unpin(self._tier_keys(tokens, cache_salt, adapter))

    def _tier_keys(self, tokens: np.ndarray, cache_salt: str, adapter: str | None) -> list[bytes]:
        """What lower tiers call a prompt's full blocks."""
        if self._runner.tiers is None:
            return []
        return self._runner.tiers.keys(self._intake.namespace_key(cache_salt, adapter), tokens)

    def reset_cache(
        self, *, keep_pinned: bool = False, disk: bool = False, remote: bool = False
    ) -> int:
        """Forget what is cached, but for the blocks of running requests; returns how many went.

        That is on the device; what host memory holds is forgotten too.

        Args:
            keep_pinned: leave the pins and what they keep.
            disk: forget what the disk cache holds as well, of other models too.
            remote: and what the remote cache holds, of other engines too.
        """
        if self._runner.tiers is not None:
            named = {"host": True, "disk": disk, "remote": remote}
            names = [name for name, wanted in named.items() if wanted]
            self._runner.tiers.stack.clear(names, keep_pinned=keep_pinned)
        self._acting(None)
        return self._runner.reset_cache(keep_pinned=keep_pinned)

    def cache_snapshot(self) -> CacheSnapshot:
        """A copy of everything that is cached now, to go back to.

        Raises:
            EngineBusy: requests wait or run.
        """
        self._must_be_idle("keep its cache aside")
        state, kv_cache = self._runner.copy_cache()
        return CacheSnapshot(
            weights_id=self._weights_id,
            state=state,
            kv_cache=kv_cache,
            namespaces=copy.deepcopy(self._intake.namespaces),
        )

    def restore_cache(self, snapshot: CacheSnapshot) -> None:
        """Cache again what was cached when the snapshot was made, which stays valid.

        Raises:
            EngineBusy: requests wait or run.
            ValueError: the snapshot is of another engine, or of other weights.
        """
        if snapshot.weights_id is not self._weights_id:
            raise ValueError("the snapshot is of another engine, or from before other weights")
        self._must_be_idle("take back a cache")
        self._runner.set_cache(snapshot.state, snapshot.kv_cache)
        self._intake.namespaces = copy.deepcopy(snapshot.namespaces)

    def _must_be_idle(self, purpose: str) -> None:
        if self.num_unfinished:
            raise EngineBusy(
                f"an engine with {self.num_unfinished} unfinished requests cannot {purpose}: "
                "drain it, or cancel them"
            )

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Check the block manager; raises `octavo.paged.InvariantViolation` on a fault."""
        self._runner.check_invariants()

    def _acting(self, request: Request | None) -> None:
        """Note for whom room is made, and when."""
        if request is not None and request.number not in self._owners:
            self._owners[request.number] = request.request_id
            if len(self._owners) > _OWNERS_REMEMBERED:
                del self._owners[next(iter(self._owners))]
        now = int(time.monotonic() - self._started)
        self._runner.acting(now, 0 if request is None else request.number)
