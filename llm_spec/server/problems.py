"""Errors as clients see them: a status, an error object and headers. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, Final

from llm_spec.contract import errors
from llm_spec.contract.errors import (
    CircuitOpenError,
    InvalidRequestError,
    LlmSpecError,
    TargetError,
    TransientError,
    UnsupportedError,
)
from llm_spec.decoder.entry_points import strip_address

__all__ = ["HttpProblem", "convert_error_to_problem", "get_model_folder", "get_public_name", "redact_server_details"]

# Statuses of RFC 9110, and OpenAI's names for them
_ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",  # Anthropic's status for it
}
# Statuses of a target that clients get too: they wait longer, or use another model
_KEPT_STATUSES: Final = (429, 503, 529)
_FIELD_PATTERN: Final = re.compile(r"[a-z][a-z_]*(?:\[\d+\])?(?:\.[a-z_]+)*(?= (?:is|has|holds|must|names)\b)")
_STATUSES: Final[Mapping[type[Exception], tuple[int, str]]] = {
    UnsupportedError: (400, "unsupported"),
    TargetError: (502, "target_failed"),
    LlmSpecError: (500, "configuration"),
}
# Providers name the server as " at URL". They quote other libraries' errors, which name its socket,
# in brackets
_ADDRESS_PATTERN: Final = re.compile(
    r" at https?://\S{1,500}|(?<=\bonnx:)[/~.]\S{0,500}/|(?<=\btorch:)[/~.]\S{0,500}/"
    r"| ?\(\w{1,60}(?:Error|Timeout|Exception): [^()]{0,500}(?:\([^()]{0,200}\)[^()]{0,200}){0,3}\)"
)
# An error that is not this library's own may quote anything: clients see only its type
_FOREIGN_ERROR_PATTERN: Final = re.compile(
    rf"( failed: \w{{1,60}}|\b(?!(?:{'|'.join(errors.__all__)})\b)\w{{1,60}}(?:Error|Timeout|Exception)): .*", re.DOTALL
)
# A server's own words may hold addresses, names of internal hosts, keys, accounts and files
_INTERNAL_NAME_PATTERN: Final = re.compile(
    r"https?://\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.(?:cluster|corp|home|internal|intranet|lan|local|svc)\b(?::\d+)?"
    r"|\b(?:sk|pk|org|proj|key)-[\w-]{8,}|\bBearer \S+"
    r"|(?<![\w/.])/(?:data|etc|home|mnt|models|opt|root|srv|tmp|usr|var)/\S+",
    re.ASCII,
)
# An error may quote what was sent, which may be long
_MAX_MESSAGE_CHARS: Final = 1000
_NO_RETRY_HEADERS: Final = {"x-should-retry": "false"}  # openai's and anthropic's SDKs obey it


class HttpProblem(Exception):  # noqa: N818 - it is sent as well as raised
    """The reason why a request is not answered.

    `param`: the field of the request that it is about.
    `retry_after_s`: the seconds to wait before a retry.
    `is_final`: a retry is of no use, or was made here already.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self._retry_after_s = retry_after_s
        self._is_final = is_final

    @property
    def type(self) -> str:
        """OpenAI's and Anthropic's name for this kind of problem."""
        if self.code == "insufficient_quota":
            return self.code
        return _ERROR_TYPES.get(self.status, "api_error")

    @property
    def retry_headers(self) -> dict[str, str]:
        """The headers that control a client's own retries."""
        headers = dict(_NO_RETRY_HEADERS) if self._is_final else {}
        if self._retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self._retry_after_s)))
        return headers

    def to_openai(self) -> dict[str, Any]:
        """The error object of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_anthropic(self) -> dict[str, Any]:
        """The error object of Anthropic's API."""
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": self.type, "message": self.message, **details}}


def convert_error_to_problem(error: Exception, secret_texts: tuple[str, ...] = ()) -> HttpProblem:
    """Convert an error to a problem without `secret_texts`, such as addresses of servers."""
    if isinstance(error, HttpProblem):
        return error
    message = redact_server_details(str(error), secret_texts, quotes_server=isinstance(error, InvalidRequestError))
    # The target's words may hold a part of the key
    if isinstance(error, TargetError) and error.status in (401, 403):
        message = "the target refused this server's key"
    if isinstance(error, InvalidRequestError):
        found = _FIELD_PATTERN.match(message)
        status = 413 if error.status == 413 else 400
        return HttpProblem(status, message, code=error.code, param=error.param or (None if found is None else found[0]))
    if isinstance(error, TransientError):
        # With a status, the message may be the server's own words
        is_silence = error.status is None and "silent" in message
        status = error.status if error.status in _KEPT_STATUSES else 504 if is_silence else 502
        code = error.code or "target_failed"
        return HttpProblem(status, message, code=code, retry_after_s=error.retry_after_s, is_final=True)
    if isinstance(error, CircuitOpenError):  # a client that waits so long may find it closed
        return HttpProblem(503, message, code="target_left_alone", retry_after_s=error.retry_after_s)
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            return HttpProblem(status, message, code=code, is_final=status >= 500)
    return HttpProblem(500, "the server failed; its log says why", code="internal", is_final=True)


def redact_server_details(message: str, secret_texts: tuple[str, ...] = (), *, quotes_server: bool = False) -> str:
    """Remove upstream addresses, `secret_texts` and quotes of other libraries from a message.

    `quotes_server`: the message may quote a server, whose words about the request are for the
    client.
    """
    # the search would take too long over a long message
    message = _ADDRESS_PATTERN.sub("", message[: 4 * _MAX_MESSAGE_CHARS])
    if not quotes_server:
        message = _FOREIGN_ERROR_PATTERN.sub(r"\1", message)
    for text in secret_texts:
        message = message.replace(text, "***")
    message = _INTERNAL_NAME_PATTERN.sub("***", message)
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + " …"


def get_public_name(text: str) -> str:
    """Return a provider string, or a provider's name, for clients.

    It has no address and no options, and only the last part of a path.
    """
    public_name = strip_address(text).partition("?")[0]
    folder = get_model_folder(text)
    # PureWindowsPath knows both kinds of slashes
    return public_name.removesuffix(folder) + PureWindowsPath(folder).name


def get_model_folder(text: str) -> str:
    """Return the local folder that a provider string names, or "" if it names none."""
    model = strip_address(text).partition("?")[0].rpartition(":")[2]
    return model if model.startswith(("/", "\\", ".", "~")) else ""
