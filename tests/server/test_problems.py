"""What a client hears of an error: status, object and headers, and nothing of the servers behind."""

from __future__ import annotations

import pytest

from llm_spec import (
    CircuitOpenError,
    ConfigError,
    InvalidRequestError,
    LlmSpecError,
    TargetError,
    TransientError,
    UnsupportedError,
)
from llm_spec.kit.http_errors import make_status_error
from llm_spec.server.problems import HttpProblem, convert_error_to_problem, redact_server_details


@pytest.mark.parametrize(
    ("error", "status", "is_final"),
    [
        (InvalidRequestError("max_tokens is 0"), 400, False),
        (UnsupportedError("no"), 400, False),
        (CircuitOpenError("left alone", retry_after_s=29.5), 503, False),
        (TransientError("busy", status=429), 429, True),
        (TransientError("busy", status=503), 503, True),
        (TransientError("busy", status=529), 529, True),
        (make_status_error(413, {}, "too large"), 413, False),
        (make_status_error(422, {}, "no"), 400, False),
        (TransientError("broken", status=500), 502, True),
        (TransientError("broke the connection"), 502, True),
        (TransientError("was silent for too long"), 504, True),
        (TransientError("answered 500: I was silent", status=500), 502, True),  # a server's own words
        (TargetError("refused"), 502, True),
        (ConfigError("wrong"), 500, True),
        (LlmSpecError("other"), 500, True),
        (RuntimeError("a mistake"), 500, True),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, is_final: bool) -> None:
    """The status says whose fault it is, and x-should-retry whether asking again was tried already."""
    problem = convert_error_to_problem(error)
    assert problem.status == status
    assert (problem.retry_headers.get("x-should-retry") == "false") is is_final
    assert set(problem.to_openai()["error"]) == {"message", "type", "param", "code"}
    told = problem.to_anthropic()["error"]
    assert told.get("details", {}).get("error_code") == problem.code
    assert set(told) - {"details"} == {"type", "message"}


def test_a_mistake_of_ones_own_is_not_explained() -> None:
    """What an unexpected error says may quote anything: clients hear nothing of it."""
    assert "prompt" not in convert_error_to_problem(RuntimeError("the prompt")).message


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (7.0, "7"), (7.1, "8"), (None, None)])
def test_the_wait_is_passed_on_in_whole_seconds(wait_s: float | None, header: str | None) -> None:
    """`Retry-After` has no fractions (RFC 9110), and never says now."""
    problem = convert_error_to_problem(TransientError("busy", status=429, retry_after_s=wait_s))
    assert problem.retry_headers.get("Retry-After") == header


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("max_tokens is 0; it must be at least 1", "max_tokens"),
        ("messages[3] is wrong: no role", "messages[3]"),
        ("messages[3].content is wrong: no text", "messages[3].content"),
        ("vllm:tiny answered 400: too long", None),
        ("The server is busy", None),
    ],
)
def test_the_field_is_read_from_the_message(message: str, param: str | None) -> None:
    """A message that begins with a field names it in `param` as well."""
    assert convert_error_to_problem(InvalidRequestError(message)).param == param


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("m at http://10.0.0.5:80/v1 answered 503: busy", "m answered 503: busy"),
        (
            "m at https://a.internal/v1 cannot be reached (ClientConnectorError: host a.internal:443 (x))",
            "m cannot be reached",
        ),
        ("m said a.internal:443 is down", "m said *** is down"),
        ("tool_choice is 'x' (see the docs)", "tool_choice is 'x' (see the docs)"),
        ("m answered 429: org-abcdefgh12 at gpu7.corp.internal, 10.1.2.3:9000", "m answered 429: *** at ***, ***"),
        ("m answered 404: no /srv/models/x; see https://u:p@host/x", "m answered 404: no *** see ***"),
        ("m answered 400: Bearer sk-up-0123456789", "m answered 400: ***"),
        ("target m failed: ValueError: no row for alice", "target m failed: ValueError"),
        ("target m failed: Fail: /models/a.onnx", "target m failed: Fail"),
        ("onnx:/srv/x/tiny and torch:~/tiny are not one", "onnx:tiny and torch:tiny are not one"),
        ("KeyError: 'what the user said'", "KeyError"),
        ("TransientError: m answered 503: busy", "TransientError: m answered 503: busy"),
        ("m broke the connection (ReadTimeout: 10.0.0.5)", "m broke the connection"),
        ("POST /v1/chat/completions in 1.2.3 of a/b", "POST /v1/chat/completions in 1.2.3 of a/b"),
    ],
)
def test_no_address_is_told(message: str, told: str) -> None:
    """Neither where a server is nor what its socket said gets to a client; all else does."""
    assert redact_server_details(message, ("a.internal:443",)) == told


def test_a_problem_is_what_it_is() -> None:
    """A problem that was raised here is reported unchanged."""
    problem = HttpProblem(404, "not here")
    assert convert_error_to_problem(problem) is problem


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 429, 500, 502, 503, 504, 529])
def test_every_status_has_a_type(status: int) -> None:
    """Both APIs' clients look at the type."""
    assert HttpProblem(status, "x").type.endswith(("_error", "_too_large"))


def test_what_a_server_says_of_a_request_is_told() -> None:
    """It is for who sent it, whatever words it begins with."""
    message = "m at http://a/v1 answered 400: ValueError: n must be 1"
    assert convert_error_to_problem(InvalidRequestError(message)).message == "m answered 400: ValueError: n must be 1"
