"""Prometheus metrics of the server, over all its workers.

Several workers write to files in one folder (see metrics_files.py), and prometheus_client reads
them all.
"""

from __future__ import annotations

import asyncio
import collections
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.samples import Sample

from llm_spec.contract.events import Usage
from llm_spec.contract.stats import SpeculativeStats
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.server.apis.acceptance import get_stats_of_verified_drafts
from llm_spec.server.metrics_files import FOLDER_VARIABLE
from llm_spec.server.models import ServedModel
from llm_spec.server.problems import HttpProblem
from llm_spec.strategies.registry import PLAIN

__all__ = ["CONTENT_TYPE", "ServerMetrics", "use_worker_metrics_files"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OVERHEAD_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)

_TOKEN_KINDS: Final = ("draft", "accepted", "wasted", "input", "output", "answer")
# Positions of a round's draft that are counted separately; only `race` often has more
_NUM_POSITIONS: Final = 16
_NO_USAGE: Final = Usage()
_UPDATE_DELAY_S: Final = 0.02


def use_worker_metrics_files(worker: int) -> None:
    """Make this process count in the files of a worker, if there are any.

    Call it before any metric is created.
    """
    if FOLDER_VARIABLE in os.environ:
        values.ValueClass = values.MultiProcessValue(process_identifier=lambda: worker)  # type: ignore[no-untyped-call] # it has no types


class ServerMetrics:
    """The metrics of one of `num_workers` workers.

    They are updated a little later, for several requests at a time, so that no request waits.
    """

    def __init__(self, *, num_workers: int = 1) -> None:
        self._call_later = asyncio.get_running_loop().call_later
        self._is_update_due = False
        self._num_open = 0
        # Not yet counted: requests by endpoint and model, and answers with their overhead by model
        self._num_new_requests = collections.Counter[tuple[str, str]]()
        self._new_answers: dict[str, list[tuple[SpeculativeResult, float]]] = {}
        self._is_shared = FOLDER_VARIABLE in os.environ
        self._is_incomplete = num_workers > 1 and not self._is_shared
        self._registry = CollectorRegistry()
        r = self._registry
        by_model = ("model",)
        self.requests = Counter("llm_spec_requests", "Requests", ("endpoint", "model"), registry=r)
        self.errors = Counter("llm_spec_errors", "Requests that ended in an error", ("status",), registry=r)
        self.cancelled = Counter("llm_spec_cancelled", "Requests whose client disconnected", registry=r)
        self._open_requests = Gauge(
            "llm_spec_open_requests", "Requests being answered", multiprocess_mode="livesum", registry=r
        )
        self.tokens = Counter("llm_spec_tokens", "Tokens by outcome", ("model", "kind"), registry=r)
        self.rounds = Counter("llm_spec_rounds", "Rounds in which something was drafted", by_model, registry=r)
        self.fallbacks = Counter("llm_spec_fallbacks", "Drafts that were abandoned", by_model, registry=r)
        self.retries = Counter("llm_spec_retries", "Requests to a target that were retried", by_model, registry=r)
        self.acceptance = _AcceptanceCounters(r)
        self.strategies = Counter("llm_spec_answers", "Answers by strategy", ("model", "strategy"), registry=r)
        self.first_text_s = _BatchHistogram(
            "llm_spec_first_text_seconds", "Time to the first text", by_model, buckets=_LATENCY_BUCKETS_S, registry=r
        )
        self.answer_s = _BatchHistogram(
            "llm_spec_answer_seconds", "Time of answers", by_model, buckets=_LATENCY_BUCKETS_S, registry=r
        )
        self._overhead = _BatchHistogram(
            "llm_spec_overhead_seconds",
            "Time that this server takes before it calls the target",
            buckets=_OVERHEAD_BUCKETS_S,
            registry=r,
        )
        self._model_metrics: dict[str, _ModelMetrics] = {}
        self._breaker_open = Gauge(
            "llm_spec_breaker_open",
            "1 while the circuit of a target or draft is open",
            ("model", "role"),
            multiprocess_mode="livemax",
            registry=r,
        )

    def set_open_requests(self, number: int) -> None:
        """Set the number of requests that are being answered."""
        self._num_open = number
        if not self._is_update_due:
            self._is_update_due = True
            self._call_later(_UPDATE_DELAY_S, self._count_pending_answers)

    def count_request(self, endpoint: str, model: str) -> None:
        """Count a request, while it is open."""
        self._num_new_requests[endpoint, model] += 1

    def count_answer(self, model: str, result: SpeculativeResult, overhead_s: float) -> None:
        """Count an answer, while its request is open."""
        self._new_answers.setdefault(model, []).append((result, overhead_s))

    def _count_pending_answers(self) -> None:
        """Update the metrics with all new requests and answers."""
        self._is_update_due = False
        self._open_requests.set(self._num_open)
        for (endpoint, model), number in self._num_new_requests.items():
            self.requests.labels(endpoint, model).inc(number)
        self._num_new_requests.clear()
        for model, answers in self._new_answers.items():
            if model not in self._model_metrics:
                self._model_metrics[model] = _ModelMetrics(self, model)
            self._model_metrics[model].count_answers(answers)
            self._overhead.observe_all([overhead_s for _, overhead_s in answers])
        self._new_answers.clear()

    def count_relayed_answer(self, model: str, usage: Usage | None) -> None:
        """Count an answer that consists of the target's own chunks."""
        if usage is not None:
            self.tokens.labels(model, "input").inc(usage.input_tokens)
            self.tokens.labels(model, "output").inc(usage.output_tokens)
        self.strategies.labels(model, PLAIN.name).inc()

    def render_prometheus_text(self, models: Iterable[ServedModel], visible: Iterable[ServedModel]) -> bytes:
        """Render the metrics in Prometheus' text format, with the series of `visible` models only.

        Raises HttpProblem if the workers could not share their metrics.
        """
        if self._is_incomplete:
            raise HttpProblem(
                503, "there are no metrics: the disk was full at the start; free space and restart the server"
            )
        self._count_pending_answers()
        for model in models:
            self._breaker_open.labels(model.name, "target").set(model.decoder.is_target_circuit_open)
            self._breaker_open.labels(model.name, "draft").set(model.decoder.is_draft_circuit_open)
        registry = self._registry
        if self._is_shared:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call] # it has no types
        return generate_latest(_VisibleModelsRegistry(registry, {model.name for model in visible}))


class _BatchHistogram(Histogram):
    """A histogram that counts several values at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        self._sum.inc(sum(amounts))  # pyright: ignore[reportUnknownMemberType] # it has no types
        for bucket, number in collections.Counter(map(partial(bisect_left, self._upper_bounds), amounts)).items():
            self._buckets[bucket].inc(number)  # pyright: ignore[reportUnknownMemberType] # as above


class _VisibleModelsRegistry(CollectorRegistry):
    """The series of a registry that belong to no model, or to one of the given models."""

    def __init__(self, registry: CollectorRegistry, models: AbstractSet[str]) -> None:
        super().__init__()
        self._registry = registry
        self._model_metrics = models

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if _get_sample_model_name(s) in (None, *self._model_metrics)]
            yield metric


def _get_sample_model_name(sample: Sample) -> str | None:
    return sample.labels.get("model", sample.labels.get("model_name"))


class _AcceptanceCounters:
    """Counts drafts under vLLM's names and labels; the names have this library's prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_model, r = ("model_name",), registry
        self._drafts = Counter("llm_spec_spec_decode_num_drafts", "Rounds with a draft", by_model, registry=r)
        self._draft_tokens = Counter("llm_spec_spec_decode_num_draft_tokens", "Drafted tokens", by_model, registry=r)
        self._accepted_tokens = Counter(
            "llm_spec_spec_decode_num_accepted_tokens", "Accepted drafted tokens", by_model, registry=r
        )
        self._accepted_per_position = Counter(
            "llm_spec_spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in a round",
            ("model_name", "position"),
            registry=r,
        )

    def list_counters(self, model: str) -> list[Counter]:
        """A model's counters, in the order of `_list_acceptance_counts`."""
        totals = [counter.labels(model) for counter in (self._drafts, self._draft_tokens, self._accepted_tokens)]
        return [*totals, *(self._accepted_per_position.labels(model, str(n)) for n in range(_NUM_POSITIONS))]


def _list_acceptance_counts(stats: SpeculativeStats) -> tuple[int, ...]:
    totals = (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens)
    return *totals, *stats.num_accepted_tokens_per_position[:_NUM_POSITIONS]


class _ModelMetrics:
    """The metrics of one model, looked up once."""

    def __init__(self, metrics: ServerMetrics, model: str) -> None:
        tokens = [metrics.tokens.labels(model, kind) for kind in _TOKEN_KINDS]
        self._counters = [*tokens, *(m.labels(model) for m in (metrics.rounds, metrics.fallbacks, metrics.retries))]
        self._first_text_s = metrics.first_text_s.labels(model)
        self._answer_s = metrics.answer_s.labels(model)
        self._get_strategy_counter = cache(partial(metrics.strategies.labels, model))
        self._get_acceptance_counters = cache(partial(metrics.acceptance.list_counters, model))

    def count_answers(self, answers: Sequence[tuple[SpeculativeResult, float]]) -> None:
        """Count answers, each with the server's overhead in seconds, which is part of its time."""
        results = [result for result, _ in answers]
        totals = map(sum, zip(*map(_list_answer_counts, results), strict=True))
        for counter, number in zip(self._counters, totals, strict=True):
            if number:
                counter.inc(number)
        for strategy, number in collections.Counter([result.strategy for result in results]).items():
            self._get_strategy_counter(strategy).inc(number)
        timings = [(result.timings, overhead_s) for result, overhead_s in answers]
        self._first_text_s.observe_all(
            [overhead_s + times.first_text_s for times, overhead_s in timings if times.first_text_s is not None]
        )
        self._answer_s.observe_all([overhead_s + times.total_s for times, overhead_s in timings])
        verified = [stats for stats in map(get_stats_of_verified_drafts, results) if stats is not None]
        if verified:
            counts = _list_acceptance_counts(sum(verified[1:], verified[0]))
            for counter, number in zip(self._get_acceptance_counters(), counts, strict=False):
                counter.inc(number)


def _list_answer_counts(result: SpeculativeResult) -> tuple[int, ...]:
    """List what an answer adds to a model's tokens of each kind, rounds, fallbacks and retries."""
    stats, usage = result.stats, result.usage or _NO_USAGE
    return (
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        stats.num_wasted_draft_tokens,
        usage.input_tokens,
        usage.output_tokens,
        usage.answer_tokens,
        stats.num_spec_steps,
        len(result.fallbacks),
        len(result.retries),
    )
