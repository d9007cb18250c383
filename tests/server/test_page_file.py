"""The server's page as a file: small, of one piece, and a recording that agrees with itself."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llm_spec.server.page import build_page

SOURCE: Final = build_page()
RECORDED: Final = re.findall(r'<script type="application/json" id="recording">\s*(.*?)\s*</script>', SOURCE)[0]


def test_the_page_is_one_file_without_foreign_parts() -> None:
    """No address of another origin, no markup made of strings, no storage."""
    addresses = set(re.findall(r"https?://[^\s\"'`]+", SOURCE))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert re.findall(r'<(?:script|link)[^>]* (?:src|href)="(?!data:)', SOURCE) == []  # all parts are in it
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|sessionStorage|eval\(|new Function"
    )
    assert re.findall(forbidden, SOURCE) == []


def test_the_recording_is_small_and_of_the_first_example() -> None:
    """A few kilobytes in a page of some tens."""
    assert len(RECORDED) < 5_000
    assert len(SOURCE.encode()) < 76_000
    examples = SOURCE[SOURCE.index("BUILTIN_EXAMPLES = [") :]
    first = examples[: examples.index("},")]
    assert f"prompt: {json.dumps(json.loads(RECORDED)['prompt'])} " in first


def test_the_recording_agrees_with_itself() -> None:
    """Times that go up, the same text on both sides, rounds that make up the answer and its figures."""
    recording = json.loads(RECORDED)
    texts: list[str] = []
    for lane in recording["lanes"]:
        times_ms = [event[0] for event in lane["events"]]
        assert times_ms == sorted(times_ms)
        assert times_ms[-1] <= 1000 * lane["result"]["timings"]["total_s"] + 1
        texts.append("".join(event[1] for event in lane["events"] if isinstance(event[1], str)))
    assert texts[0] == texts[1] != ""
    with_draft_s, alone_s = (lane["result"]["timings"]["total_s"] for lane in recording["lanes"])
    low, high = recording["quartiles"]
    assert low <= alone_s / with_draft_s <= high
    assert recording["num_races"] % 2 == 1  # so that the median is one of them
    lane = recording["lanes"][0]
    told: dict[str, Any] = lane["result"]
    rounds = [event for event in lane["events"] if not isinstance(event[1], str)]
    drafted, accepted, emitted = (sum(each[place] for each in rounds) for place in (2, 3, 4))
    assert (drafted, accepted) == (told["draft_tokens"], told["accepted_tokens"])
    assert emitted == lane["usage"]["completion_tokens"]
    assert len(rounds) == told["metrics"]["num_rounds"]
