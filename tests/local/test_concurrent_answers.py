"""How many answers are written at the same time, on average."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from llm_spec import ChatRequest
from llm_spec.contract.events import LocalTimings
from llm_spec.local import concurrent_answers
from llm_spec.local.answer import generate_events
from llm_spec.local.concurrent_answers import count_concurrent_answers, count_open_answers
from llm_spec.testing import TableModel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only item; answers that other tests have left are not counted."""
    time_s = [100.0]
    gc.collect()
    monkeypatch.setattr(concurrent_answers, "_clock", concurrent_answers._AnswerClock())
    monkeypatch.setattr(concurrent_answers.time, "perf_counter", lambda: time_s[0])
    return time_s


def test_the_mean_is_over_the_time_of_an_answer(clock: list[float]) -> None:
    """Of four seconds one beside two others, one beside one, two alone."""
    with count_concurrent_answers() as average:
        assert average() == pytest.approx(1.0)
        with count_concurrent_answers(), count_concurrent_answers() as average_of_last:
            assert count_open_answers() == 3
            clock[0] += 1.0
        assert average_of_last() == pytest.approx(3.0)
        with count_concurrent_answers():
            clock[0] += 1.0
        clock[0] += 2.0
        assert average() == pytest.approx((3 + 2 + 1 + 1) / 4)
    assert count_open_answers() == 0


def test_answers_of_local_models_are_counted(clock: list[float]) -> None:
    """From reading the prompt to the end, also of one that is left."""

    def answer() -> Generator[object]:
        request = ChatRequest.create("ab", max_tokens=6)
        for events in generate_events(TableModel("abcdefghij", order=1), request):
            clock[0] += 1.0
            yield from events

    with count_concurrent_answers():
        timings = [event for event in answer() if isinstance(event, LocalTimings)]
    assert [timing.num_concurrent for timing in timings] == [pytest.approx(2.0)]
    left = answer()
    next(left)
    assert count_open_answers() == 1
    left.close()
    assert count_open_answers() == 0
