"""`benchmarks/never_slower.py --quick`: by virtual clock, so that the figures are the same on every machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "never_slower.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command measured; it says itself, too, whether a bound was missed."""
    file = tmp_path_factory.mktemp("never_slower") / "report.json"
    ended = subprocess.run(
        [sys.executable, "-W", "error", BENCHMARK, "--quick", "--json", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.stderr, ended.stderr
    assert ended.returncode == 0, ended.stdout
    return json.loads(file.read_text(encoding="utf-8"))


def test_race_is_never_slower_than_plain(report: dict[str, Any]) -> None:
    """Not a single answer, at any agreement and latency, by ids and by text, cold and warm."""
    assert report["race"]["worst"] <= 1.02, report["race"]["worst_cell"]


def test_race_backs_off_from_a_useless_draft(report: dict[str, Any]) -> None:
    """It does not draft anew after every token."""
    assert report["race"]["pauses"]["0.0"] >= 8
    assert report["race"]["pauses"]["0.5"] >= 3


@pytest.mark.parametrize(("agreement", "least"), [(0.98, 1.6), (0.99, 2.2)])
def test_race_pays_with_a_good_draft(report: dict[str, Any], agreement: float, least: float) -> None:
    """A first token worth 27 tokens, twelve streams, a draft that takes no time."""
    rows = [row for row in report["headline"]["rows"] if row["agreement"] == agreement]
    assert {row["by_ids"] for row in rows} == {True, False}
    assert min(row["speedup"] for row in rows) >= least


@pytest.mark.parametrize(("agreement", "least"), [(0.8, 1.5), (0.9, 2.1)])
def test_probe_pays_with_a_fair_draft(report: dict[str, Any], agreement: float, least: float) -> None:
    """Four rounds at a time; one after another they are slower."""
    rows = {row["streams"]: row["speedup"] for row in report["probe"]["rows"] if row["agreement"] == agreement}
    assert rows[4] >= least
    assert rows[4] > rows[1]
