"""What becomes of an engine as a whole: drained, resumed, given other weights."""

from __future__ import annotations

from dataclasses import replace

from ..models import LoadedModel, load_model
from .cache_control import CacheControl
from .intake import Intake
from .outputs import RequestOutput
from .request import Request
from .runner import ModelRunner
from .scheduler import Scheduler


class Lifecycle(CacheControl):
    """An engine that may be told to take no more requests, and be given other weights."""

    _scheduler: Scheduler

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, intake: Intake):
        super().__init__(loaded, runner, intake)
        self._draining = False
        self._fingerprints = {loaded.fingerprint}

    def begin_drain(self, *, cancel_waiting: bool = False) -> list[RequestOutput]:
        """Take no new requests until `resume`; returns the last outputs of the cancelled ones.

        Args:
            cancel_waiting: end the requests that have not started; else they are served as well.
        """
        self._draining = True
        new = [r for r in self._scheduler.waiting if r.num_cached_tokens is None]
        return [self._cancelled(request) for request in new] if cancel_waiting else []

    def drain(self, *, cancel_waiting: bool = False) -> list[RequestOutput]:
        """Take no new requests, finish those that are here, and return what no stream collects."""
        outputs = self.begin_drain(cancel_waiting=cancel_waiting)
        while self.num_unfinished:
            outputs += self._pump()
        return outputs

    def resume(self) -> None:
        """Take requests again."""
        self._draining = False

    def load_weights(self, model: LoadedModel | str) -> None:
        """Go on with other weights of the same architecture; nothing is compiled again.

        Nothing of what the old ones computed is found afterwards, and snapshots end with them.

        Args:
            model: a loaded model, or what `octavo.models.load_model` takes; that is quantised as
                the old weights are.

        Raises:
            EngineBusy: requests wait or run.
            ValueError: the architecture is another one; nothing has changed.
        """
        self._must_be_idle("change its weights")
        if isinstance(model, str):
            loaded = load_model(model, quantization=self.loaded.quantization)
        else:
            loaded = model
        loaded = replace(loaded, model=loaded.model.packed())
        self._runner.check_weights(loaded.model)
        # Wherever an interrupt comes, nothing old is found that new weights could meet.
        self._weights_id = object()
        self.reset_cache()
        tiers = self._runner.tiers
        if tiers is not None:
            tiers.distrust(True)
        self._runner.load_weights(loaded.model)
        self.loaded = self._intake.loaded = loaded
        if tiers is not None:
            # Weights made by hand may bear the fingerprint of those that they were made from.
            by_hand = not isinstance(model, str) and loaded.fingerprint in self._fingerprints
            tiers.distrust(by_hand)
        self._fingerprints.add(loaded.fingerprint)

    def _cancelled(self, request: Request) -> RequestOutput:
        raise NotImplementedError

    def _pump(self) -> list[RequestOutput]:
        raise NotImplementedError
