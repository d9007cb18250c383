"""Errors: what callers may rely on."""

from __future__ import annotations

import pytest

from llm_spec.contract import errors
from llm_spec.contract.errors import (
    BudgetError,
    CircuitOpenError,
    InvalidRequestError,
    LlmSpecError,
    TargetError,
    TransientError,
    UnsupportedError,
    format_error_line,
    is_permanent_refusal,
)


def test_every_error_has_one_base() -> None:
    """`except LlmSpecError` catches whatever this library raises on purpose."""
    classes = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert [c.__name__ for c in classes if not issubclass(c, LlmSpecError)] == []
    assert classes


@pytest.mark.parametrize("class_", [errors.ConfigError, InvalidRequestError])
def test_wrong_values_are_value_errors(class_: type[Exception]) -> None:
    """Programs that expect Python's own error for a wrong value need no change."""
    assert issubclass(class_, ValueError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("top_k"), True),
        (TargetError("401", status=401), True),
        (RuntimeError("a provider's own"), True),
        (TransientError("503"), False),
        (CircuitOpenError("open"), False),
        (BudgetError("spent"), False),
        (UnsupportedError("no strategy"), False),
    ],
)
def test_a_refusal_does_not_pass_by_itself(error: Exception, expected: bool) -> None:
    """What will pass, and what was never sent, says nothing about the call."""
    assert is_permanent_refusal(error) is expected


def test_an_error_is_formatted_in_one_line() -> None:
    """Logs have one line for an error, whatever its text."""
    assert format_error_line(TargetError("first\n  second\t third")) == "TargetError: first second third"
    assert format_error_line(TimeoutError()) == "TimeoutError"
