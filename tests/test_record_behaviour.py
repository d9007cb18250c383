"""Recordings of whole requests: equal when nothing has changed, and what has changed is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import record_behaviour
from record_behaviour import compare, main, read_file, record

from llm_spec import SpeculativeResult

VIRTUAL = ["virtual tokens 19", "virtual race 13", "virtual judge 47"]
NAMES = [*VIRTUAL, "wire vllm 2", "wire openai 2", "wire anthropic 3"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return record(NAMES, 1)


def test_two_recordings_are_equal(recorded: dict[str, Any]) -> None:
    assert compare(recorded, record(NAMES, 1)) == {}


def test_a_file_holds_what_was_recorded(
    recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_behaviour, "draw_names", lambda _: VIRTUAL)
    file = str(tmp_path / "recorded.gz")
    assert main(["record", file, "--processes", "1"]) == 0
    assert read_file(Path(file))[1] == {name: recorded[name] for name in VIRTUAL}
    assert main(["compare", file, "--processes", "1"]) == 0


def test_drafts_were_accepted_and_requests_sent(recorded: dict[str, Any]) -> None:
    """The cases are not empty ones."""
    counts = record_behaviour.count(recorded)
    assert any(kind.get("accepted") for kind in counts.values())
    assert all(recorded[name]["sent"] for name in NAMES if name.startswith("wire"))


def test_a_changed_usage_is_seen(recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeResult, "num_tokens", 5)
    found = compare(recorded, record(VIRTUAL, 1))
    assert any("/ tokens: " in difference for difference in found[VIRTUAL[0]])


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ({"text": "the plain one"}, {"text": "the lone one"}, {"renamed": {"plain": "lone"}}),
        ({"words": "it broke"}, {"words": "broken"}, {"ignore_messages": True}),
    ],
)
def test_what_may_differ(before: Any, after: Any, options: dict[str, Any]) -> None:
    """Renamed words and text for people, where that is said."""
    assert compare({"case": before}, {"case": after}, **options) == {}
    assert list(compare({"case": before}, {"case": after})) == ["case"]


@pytest.mark.parametrize("after", [{"a": [2, 1]}, {"a": [1, 2], "b": None}, {"a": [1]}, {"a": [1, 2.0]}, {}])
def test_what_may_not_differ(after: Any) -> None:
    """Order, number, kind and presence of values."""
    assert compare({"case": {"a": [1, 2]}}, {"case": after})
    assert compare({"case": {"a": [1, 2]}}, {"other": {"a": [1, 2]}}).keys() == {"case", "other"}
