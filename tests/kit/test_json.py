"""JSON with and without orjson: the same values, and texts that mean the same."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_spec.kit import json as json_text

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture(params=["orjson", "json"], scope="module")
def module(request: pytest.FixtureRequest) -> Generator[ModuleType]:
    """The module as it is with orjson, and as it is without."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
        yield json_text
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "orjson", None)
        yield importlib.reload(json_text)
    importlib.reload(json_text)


@given(value=VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(module: ModuleType, value: object) -> None:
    """A value comes back from either text as it was, and the standard library reads both."""
    for text in (module.dumps(value), module.dumps_ascii(value)):
        assert module.loads(text) == json.loads(text) == value
        assert module.loads(text.decode()) == value


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2**70, 2**70),
        (("a", 1), ["a", 1]),
        ("half \ud83d", "half \ufffd"),
        ({"a": ["\udc00", -(2**65)]}, {"a": ["\ufffd", -(2**65)]}),
        (["\ud83d\ude00", "\ude00\ud83d", "\\ud83d", "😀"], ["😀", "\ufffd\ufffd", "\\ud83d", "😀"]),
        ({"a": [math.nan, (math.inf, "\ud83d")], "b": -math.inf}, {"a": [None, [None, "\ufffd"]], "b": None}),
    ],
    ids=["large", "tuple", "half", "both", "halves", "no numbers"],
)
def test_what_orjson_does_not_write(module: ModuleType, value: Any, written: Any) -> None:
    """It is written all the same, as JSON that every reader takes."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for text in (module.dumps(value), module.dumps_ascii(value)):
        assert json.loads(text, parse_constant=refuse) == written


def test_what_orjson_does_not_read(module: ModuleType) -> None:
    """Servers send numbers that are none, and halves of characters."""
    lowest, unknown, half = module.loads('[-Infinity, NaN, "\\ud83d"]')
    assert lowest == -math.inf
    assert math.isnan(unknown)
    assert half == "\ud83d"


@pytest.mark.parametrize("text", ["", "{", "nul", "[1,]", '{"a" 1}', "\ufeff{}"])
def test_no_json(module: ModuleType, text: str) -> None:
    """A ValueError, whoever read it."""
    with pytest.raises(ValueError, match=r"\w"):
        module.loads(text)


def test_no_words_in_json(module: ModuleType) -> None:
    """A TypeError, whoever wrote it."""
    with pytest.raises(TypeError):
        module.dumps(object())


def test_lines_cannot_be_cut(module: ModuleType) -> None:
    """ASCII has none of the characters at which some readers cut lines."""
    assert module.dumps_ascii("a\u2028b\x85c\nd") == rb'"a\u2028b\u0085c\nd"'
