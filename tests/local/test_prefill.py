"""Prompts are read in pieces: an exact session's of one size, a draft's as small as reading is slow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llm_spec.local import caches as prefill
from llm_spec.local.caches import prefill_prompt
from llm_spec.testing import TableModel

PROMPT = [65] * 700


@pytest.mark.parametrize(
    ("forward_s", "exact", "widths"),
    [
        (1.0, True, [256, 256, 188]),
        (0.001, False, [16, 64, 128, 256, 236]),
        (1.0, False, [16, *[32] * 21, 12]),
        (0.03, False, [16, *[32] * 21, 12]),
    ],
)
def test_pieces(forward_s: float, exact: bool, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(prefill, "time", SimpleNamespace(perf_counter=lambda: now_s))
    model = TableModel(forward_s=forward_s, sleep=pass_time)
    session = model.open(exact=exact)
    prefill_prompt(session, PROMPT, exact=exact)
    assert model.widths == widths
    assert session.length == len(PROMPT)
    session.close()


def test_a_cancelled_request_reads_no_further_piece() -> None:
    model = TableModel()
    session = model.open()
    prefill_prompt(session, PROMPT, lambda: session.length > 300)
    assert session.length == 512
    session.close()
