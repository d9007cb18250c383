"""Translates a server's refusal, from its HTTP status and headers, to this library's errors. Pure.

It honours `x-should-retry` and `retry-after-ms`, which OpenAI and Anthropic send, and `Retry-After`
in seconds or as a date (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, cast

from llm_spec.contract.errors import InvalidRequestError, LlmSpecError, TargetError, TransientError
from llm_spec.kit.server_addresses import strip_credentials

__all__ = [
    "find_reported_error",
    "get_error_words",
    "get_status_advice",
    "make_status_error",
    "mask_secrets",
    "read_retry_after_s",
    "read_stream_error_status",
]

_INVALID_STATUSES: Final = frozenset({400, 413, 422})
_TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
# Codes and types of errors inside a stream, which itself began with status 200
_STATUS_BY_ERROR_TYPE: Final[Mapping[str, int]] = {
    "api_error": 500,
    "authentication_error": 401,
    "badrequesterror": 400,  # vLLM, SGLang
    "billing_error": 402,
    "content_filter": 400,
    "content_policy_violation": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "internalservererror": 500,
    "notfounderror": 404,
    "ratelimiterror": 429,
    "serviceunavailableerror": 503,
    "unprocessableentityerror": 422,
    "insufficient_quota": 429,
    "invalid_api_key": 401,
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "request_too_large": 413,
    "model_not_found": 404,
    "not_found_error": 404,
    "overloaded_error": 503,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "server_error": 500,
    "timeout_error": 504,
    "unavailable": 503,
    "validation": 422,  # TGI
    # FastChat: the model, a parameter, the context; its other codes begin with their status
    "40301": 404,
    "40302": 400,
    "40303": 400,
}
_UNKNOWN_STATUS: Final = 500
_CONTEXT_CODE: Final = "context_length_exceeded"
_CANONICAL_CODES: Final[Mapping[str, str]] = {
    "exceed_context_size_error": _CONTEXT_CODE,  # llama.cpp's type
    "40303": _CONTEXT_CODE,  # FastChat
    "1261": _CONTEXT_CODE,  # Zhipu
    "context_window_exceeded": _CONTEXT_CODE,
    "prompt_too_long": _CONTEXT_CODE,
}
_N: Final = r"~?\d[\d,.]*"
# Beginnings of servers' messages about a prompt that is too long. The forms match from the first
# word on, with their numbers, so that a message that quotes a user's text does not match.
_CONTEXT_FORMS: Final = re.compile(
    r"(?:litellm\.)?(?:ContextWindowExceededError: )?(?:litellm\.BadRequestError: )?(?:\w+Exception - )?"
    r"(?:Error code: 400 - )?(?:Input validation error: )?(?:Invalid request: )?(?:"
    + "|".join(
        form.replace("<n>", _N)
        for form in (
            # OpenAI, vLLM, DeepSeek, xAI
            r"This (?:model|endpoint)'s maximum (?:context|prompt) length is <n>",
            # vLLM
            r"The (?:decoder|encoder|engine)? ?prompt \((?:total )?length <n>\) (?:is longer|exceeds)",
            r"Input length \(<n>(?: tokens)?\) (?:exceeds|is longer than)",  # vLLM, SGLang
            r"The input \(<n> tokens\) is longer than the model's context length",  # SGLang
            r"Requested token count exceeds the model's maximum context length",  # SGLang
            r"(?:the )?request(?: \(<n> tokens\))? exceeds the available context size",  # llama.cpp
            r"(?:the )?input (?:length )?exceeds (?:the )?(?:maximum )?context length",  # Ollama
            r"prompt (?:is )?too long[;:] ",  # Ollama, Anthropic
            r"The prompt is too long: <n>",  # Fireworks
            r"`?inputs`? must have less than <n> `?tokens`?",  # TGI
            r"`?inputs`? tokens \+ `?max_new_tokens`? must be <= <n>",  # TGI, Together
            r"input length and `?max_tokens`? exceed context limit",  # Anthropic
            r"Trying to keep the first <n> tokens when context the overflows",  # LM Studio
            r"The number of tokens to keep from the initial prompt is greater than the context length",
            r"Reached context length of <n> tokens",
            r"Cannot truncate prompt with n_keep",
            r"Requested tokens \(<n>\) exceed context window of <n>",  # llama-cpp-python
            r"Prompt contains <n> tokens(?: and <n> draft tokens)?, too large for model",  # Mistral
            # TabbyAPI, TensorRT-LLM
            r"Prompt (?:length|with) \(?<n>\)?.{0,40}?(?:exceeds|is greater than)",
            r"Please reduce the length of the messages or completion",  # Groq, Cerebras
            # Gemini
            r"The input token count(?: \(<n>\))? exceeds the maximum number of tokens allowed",
            r"Input is too long for requested model",  # Bedrock
            r"too many tokens: ",  # Cohere
            # Qwen
            r"(?:<400> )?(?:InternalError\.Algo\.InvalidParameter: )?Range of input length should be \[",
            r"Your request exceeded model token limit",  # Moonshot
            r"Prompt exceeds max length",  # Zhipu
        )
    )
    + ")",
    re.IGNORECASE,
)
_CODE_PATTERN: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}")  # a number would only repeat the status
_PARAM_PATTERN: Final = re.compile(r"[A-Za-z_][\w.\[\]-]{0,127}")
_MIN_SECRET_LENGTH: Final = 8
_MAX_LOCATION_CHARS: Final = 200


def mask_secrets(text: str, *secrets: str | None) -> str:
    """Return a text with these keys masked.

    A key of fewer than 8 characters stays: it could be part of any word.
    """
    for secret in secrets:
        if secret is not None and len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "***")
    return text


def get_status_advice(
    status: int, headers: Mapping[str, str], *, key_variable: str | None, has_credentials: bool = False
) -> str:
    """Return what to do about a status, for the end of its error, or "" if that is unknown.

    `headers`: looked up in lower case; those of a redirect name its destination.
    `has_credentials`: the address has a user and a password, which are sent in place of a key.
    """
    if status in (401, 403):
        return (
            "; check the user and password of the address" if has_credentials else f"; check the key ({key_variable})"
        )
    if status == 404:
        return "; check the model's name and the address"
    if status == 407:
        return "; check the user and password of the proxy"
    location = re.split(r"[?#]", headers.get("location", ""))[0]
    if 300 <= status < 400 and location:
        return f"; it redirects to {strip_credentials(location)[:_MAX_LOCATION_CHARS]}: make that the address"
    return ""


def make_status_error(
    status: int, headers: Mapping[str, str], message: str, *, reported: object = None
) -> LlmSpecError:
    """Return the error for a response without an answer.

    It is InvalidRequestError, TransientError (try again later) or TargetError.

    `headers`: looked up in lower case.
    `message`: the whole text of the error.
    `reported`: the server's error object, if it sent one. `code` and `param` come from it.
    """
    error = _choose_status_error(status, headers, message)
    error.status = status
    words = get_error_words(reported)
    if isinstance(reported, Mapping):
        error.code, error.param = _read_code_and_param(cast("Mapping[str, object]", reported))
    if status in _INVALID_STATUSES and _CONTEXT_FORMS.match(words):
        error.code = _CONTEXT_CODE
    return error


def _read_code_and_param(reported: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the code and the parameter that an error object names.

    Only single words are accepted, since longer texts may quote a prompt.
    """
    details = reported.get("details")  # Anthropic's codes are in it
    named = cast("Mapping[str, object]", details).get("error_code") if isinstance(details, Mapping) else None
    kind, number = str(reported.get("type")), str(reported.get("code") or reported.get("error_code"))
    for code in (_CANONICAL_CODES.get(kind), _CANONICAL_CODES.get(number), named, reported.get("code")):
        if isinstance(code, str) and _CODE_PATTERN.fullmatch(code):
            break
    else:
        code = None
    param = reported.get("param")
    return code, param if isinstance(param, str) and _PARAM_PATTERN.fullmatch(param) else None


def find_reported_error(answer: Mapping[str, object]) -> object:
    """Return the error that a server reports in place of an answer or a chunk, or None.

    Most servers send `error`. Others send the fields of one error at the top level (vLLM's `object:
    error`), a text with an `error_code` (FastChat), or the error of their web framework (`detail`).
    Each of these has a message, and no choices.
    """
    if error := answer.get("error"):
        return error
    if answer.get("choices"):
        return None
    is_flat = answer.get("object") == "error" or answer.get("type") == "error" or answer.get("error_code")
    if is_flat or any(
        answer.get(name) and isinstance(answer[name], str) for name in ("detail", "message", "error_msg")
    ):
        return answer
    for name in ("detail", "errors"):
        if answer.get(name) and isinstance(answer[name], list | dict):
            return answer
    base = answer.get("base_resp")  # MiniMax
    if not isinstance(base, Mapping):
        return None
    fields = cast("Mapping[str, object]", base)
    return fields if fields.get("status_code") else None


def get_error_words(error: object) -> str:
    """Return the text of a server's error, in any of the usual forms."""
    if not isinstance(error, Mapping):
        return "" if error is None else str(error)
    fields = cast("Mapping[str, object]", error)
    for name in ("error", "message", "detail", "error_msg", "status_msg", "text", "msg"):
        if value := fields.get(name):
            return get_error_words(value)
    return str(dict(fields))


def _choose_status_error(status: int, headers: Mapping[str, str], message: str) -> LlmSpecError:
    if status in _INVALID_STATUSES:
        return InvalidRequestError(message)
    is_transient = status in _TRANSIENT_STATUSES or status >= 500
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        is_transient = wish == "true"
    if not is_transient:
        return TargetError(message, status=status)
    return TransientError(message, retry_after_s=read_retry_after_s(headers), status=status)


def read_stream_error_status(error: object) -> int:
    """Return the HTTP status of an error object inside a stream; 500 if it has none.

    Gateways such as OpenRouter send the status itself as `code`; OpenAI sends words as `code` and
    `type`.
    """
    if not isinstance(error, Mapping):
        return _UNKNOWN_STATUS
    fields = cast("Mapping[str, object]", error)
    for name in ("code", "error_code", "type", "error_type", "status", "status_code"):
        word = str(fields.get(name)).removesuffix(".0").lower()
        status = _STATUS_BY_ERROR_TYPE.get(word)
        if status is None and word.isdecimal() and word.isascii() and len(word) in (3, 5):
            status = int(word[:3])
        if status is not None and 400 <= status <= 599:
            return status
    return _UNKNOWN_STATUS


def read_retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the seconds to wait before a retry, never negative.

    Returns None if the server does not say, or in a form that cannot be read.
    """
    retry_after = headers.get("retry-after", "")
    for text, unit_s in ((headers.get("retry-after-ms", ""), 1e-3), (retry_after, 1.0)):
        try:
            seconds = float(text) * unit_s
        except ValueError:
            continue
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        at = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())
