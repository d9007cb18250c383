"""What an error object inside a stream means, whose HTTP status was good."""

from __future__ import annotations

import pytest

from llm_spec.failures import status_in_stream


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
    assert status_in_stream(error) == status


@pytest.mark.parametrize("error", [{}, {"code": "odd"}, {"code": 200}, {"code": 10**30}, {"code": True}, "words", None])
def test_what_does_not_say(error: object) -> None:
    """It counts as a failure of the server."""
    assert status_in_stream(error) == 500
