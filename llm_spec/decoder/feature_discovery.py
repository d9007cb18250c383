"""Discovery: what a target can do, found out beside the requests, none of which pays for it longer than it likes."""

from __future__ import annotations

import asyncio
from copy import copy
from functools import partial
from typing import Final

from llm_spec.contract.endpoint import Discoverable, Feature
from llm_spec.contract.errors import LlmSpecError
from llm_spec.contract.provider import LlmProvider
from llm_spec.measure.clock import get_asyncio_loop, now

__all__ = ["FeatureDiscovery"]

_MAX_WAIT_S: Final = 10.0


class FeatureDiscovery:
    """The trials of one target's features. They go on when a request that waits for them is left.

    Whoever made it closes it, on the event loop that used it; trials of other event loops are theirs.
    """

    def __init__(self, target: LlmProvider) -> None:
        self._target = target if isinstance(target, Discoverable) else None
        self._latest: dict[Feature, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._tried: set[Feature] = set()
        self._patience_s: float | None = (
            None  # what `finish_interrupted_trials` may still wait; None: nothing was cut off yet
        )

    async def wait_until_tried(self, feature: Feature | None) -> bool:
        """Wait until a feature has been tried; raises what the trial raised. False: it was ended by `aclose`."""
        if self._target is None or feature is None:
            return True
        trial = self._get_or_start_trial(self._target, feature)
        await asyncio.wait([trial])
        if trial.cancelled():
            return False
        error = trial.exception()
        if isinstance(error, LlmSpecError):
            raise copy(error) from error  # each request puts its own text into what it raises
        if error is not None:
            raise error
        return True

    async def has_tried_or_start_trial(self, feature: Feature | None) -> bool:
        """Whether a feature has been tried. If not, a trial starts in the background."""
        if self._target is None or feature is None:
            return True
        trial = self._get_or_start_trial(self._target, feature)
        await asyncio.wait([trial], timeout=0)  # one turn of the loop: a target that knows needs no more
        return _has_trial_succeeded(trial)

    def has_tried(self, feature: Feature) -> bool:
        """Whether a trial of it has come to an end here; false also of what the target knew before."""
        return feature in self._tried

    async def finish_interrupted_trials(self) -> None:
        """Wait for the trials under way, 10 s in all, if one before was cut off by the end of its event loop.

        Else programs that run every answer in a loop of its own would begin one with each, and finish none.
        """
        if not self._patience_s:
            return
        started_s = now()
        trials = [trial for trial in self._running if trial.get_loop() is asyncio.get_running_loop()]
        try:
            if trials:
                await asyncio.wait(trials, timeout=self._patience_s)
        finally:
            self._patience_s = max(0.0, self._patience_s - (now() - started_s))

    async def aclose(self) -> None:
        """End the trials that are under way."""
        loop = get_asyncio_loop()
        trials = [trial for trial in self._running if trial.get_loop() is loop]
        for trial in trials:
            trial.cancel()
        await asyncio.gather(*trials, return_exceptions=True)

    def _get_or_start_trial(self, target: Discoverable, feature: Feature) -> asyncio.Task[None]:
        """The trial that is under way, or a new one: what a target knew it may have lost since."""
        trial = self._latest.get(feature)
        if trial is not None and trial.get_loop().is_closed() and (trial.cancelled() or not trial.done()):
            self._patience_s = _MAX_WAIT_S if self._patience_s is None else self._patience_s
        if trial is None or trial.done() or trial.get_loop() is not asyncio.get_running_loop():
            trial = self._latest[feature] = asyncio.create_task(target.discover(feature))
            self._running.add(trial)
            trial.add_done_callback(partial(self._forget_trial, feature))
        return trial

    def _forget_trial(self, feature: Feature, trial: asyncio.Task[None]) -> None:
        self._running.discard(trial)
        if not trial.cancelled() and trial.exception() is None:  # perhaps nobody waits for it any more
            self._tried.add(feature)


def _has_trial_succeeded(trial: asyncio.Task[None]) -> bool:
    return trial.done() and not trial.cancelled() and trial.exception() is None
