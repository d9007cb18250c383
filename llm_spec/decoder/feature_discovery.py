"""Finds out in the background what a target supports.

Requests wait for it no longer than their own timeouts allow.
"""

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
    """The trials of one target's features. A trial continues when a request that waits for it ends.

    Its owner closes it, on the event loop that used it. Trials of other event loops are not
    affected.
    """

    def __init__(self, target: LlmProvider) -> None:
        self._target = target if isinstance(target, Discoverable) else None
        self._latest: dict[Feature, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._tried: set[Feature] = set()
        self._patience_s: float | None = (
            # how long `finish_interrupted_trials` may still wait; None: no trial was cut off yet
            None
        )

    async def wait_until_tried(self, feature: Feature | None) -> bool:
        """Wait until a feature has been tried; raises what the trial raised.

        Returns False if `aclose` ended the trial.
        """
        if self._target is None or feature is None:
            return True
        trial = self._get_or_start_trial(self._target, feature)
        await asyncio.wait([trial])
        if trial.cancelled():
            return False
        error = trial.exception()
        if isinstance(error, LlmSpecError):
            raise copy(error) from error  # each request adds its own text to its error
        if error is not None:
            raise error
        return True

    async def has_tried_or_start_trial(self, feature: Feature | None) -> bool:
        """Return True if a feature has been tried; otherwise start a trial in the background."""
        if self._target is None or feature is None:
            return True
        trial = self._get_or_start_trial(self._target, feature)
        # one turn of the loop: enough for a target that knows already
        await asyncio.wait([trial], timeout=0)
        return _has_trial_succeeded(trial)

    def has_tried(self, feature: Feature) -> bool:
        """Return True if a trial ended here; what the target knew before does not count."""
        return feature in self._tried

    async def finish_interrupted_trials(self) -> None:
        """Wait for the trials under way if the end of an event loop cut off an earlier one.

        It waits at most 10 s in all. Otherwise a program that runs each answer in its own event
        loop would begin a trial with each, and finish none.
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
        """Cancel the trials under way."""
        loop = get_asyncio_loop()
        trials = [trial for trial in self._running if trial.get_loop() is loop]
        for trial in trials:
            trial.cancel()
        await asyncio.gather(*trials, return_exceptions=True)

    def _get_or_start_trial(self, target: Discoverable, feature: Feature) -> asyncio.Task[None]:
        """Return the trial under way, or start one: the target may have lost a feature since."""
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
        # perhaps no request waits for it any more
        if not trial.cancelled() and trial.exception() is None:
            self._tried.add(feature)


def _has_trial_succeeded(trial: asyncio.Task[None]) -> bool:
    return trial.done() and not trial.cancelled() and trial.exception() is None
