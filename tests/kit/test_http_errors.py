"""What an error object inside a stream means, whose HTTP status was good."""

from __future__ import annotations

import pytest

from llm_spec.kit.http_errors import make_status_error, mask_secrets, read_stream_error_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400, "message": "too long"}, 400),  # OpenRouter
        ({"code": "429"}, 429),
        ({"code": 502, "metadata": {"provider_name": "x"}}, 502),
        ({"code": "context_length_exceeded", "type": "invalid_request_error"}, 400),
        ({"code": None, "type": "server_error"}, 500),  # OpenAI
        ({"code": "rate_limit_exceeded", "type": "tokens"}, 429),
        ({"code": "odd", "type": "invalid_request_error"}, 400),  # the type counts where the code is unknown
    ],
)
def test_codes_and_types(error: object, status: int) -> None:
    """A number is the status itself; words are known ones of `code`, then of `type`."""
    assert read_stream_error_status(error) == status


@pytest.mark.parametrize("error", [{}, {"code": "odd"}, {"code": 200}, {"code": 10**30}, {"code": True}, "words", None])
def test_what_does_not_say(error: object) -> None:
    """It counts as a failure of the server."""
    assert read_stream_error_status(error) == 500


@pytest.mark.parametrize(
    ("reported", "code", "param"),
    [
        ({"code": "context_length_exceeded", "param": "messages"}, "context_length_exceeded", "messages"),
        ({"code": 400, "param": "tools[0].function", "type": "BadRequestError"}, None, "tools[0].function"),  # vLLM
        ({"code": 400, "type": "exceed_context_size_error"}, "context_length_exceeded", None),  # llama.cpp
        (
            {"type": "invalid_request_error", "details": {"error_code": "tool_name_conflict"}},
            "tool_name_conflict",
            None,
        ),
        ({"code": "it says: your prompt", "param": "http://10.0.0.1/v1"}, None, None),
        ({"code": None, "param": {}}, None, None),
        ("words", None, None),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("status", [400, 404, 429])
def test_a_servers_own_names_are_kept(status: int, reported: object, code: str | None, param: str | None) -> None:
    """A code and a parameter, as far as they are names; other texts could quote anything."""
    error = make_status_error(status, {}, "a line", reported=reported)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("secrets", "told"),
    [
        (["sk-12345678", None], "the key *** is a key"),
        (["e", "key"], "the key sk-12345678 is a key"),
        ([""], "the key sk-12345678 is a key"),
    ],
)
def test_what_is_too_short_for_a_secret_mangles_nothing(secrets: list[str | None], told: str) -> None:
    assert mask_secrets("the key sk-12345678 is a key", *secrets) == told
