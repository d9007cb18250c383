"""Log events, through structlog: one per round and per request, each with the request's id as `llm_request_id`.

`request_id` is what applications and servers call theirs.

An application that has configured structlog gets them through its own processors. In any other they go to the
standard library's logger `llm_spec`, which is silent below WARNING unless the application says otherwise.
Message text is never among the fields, except by `SpeculativeConfig.log_content`.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Final

__all__ = ["RequestLogContext", "is_log_enabled", "log_event", "make_request_id"]

_STDLIB: Final = logging.getLogger("llm_spec")
_REQUEST_ID: Final[ContextVar[str | None]] = ContextVar("llm_request_id", default=None)

_ARGUMENTS: Final = ("event", "level")  # of structlog's `log`


def make_request_id() -> str:
    """A short random id that ties the events of one request together."""
    return f"{random.getrandbits(48):012x}"


class RequestLogContext:
    """Binds a request's id to whatever is logged inside `with`, by this library or by a provider.

    In structlog's context too, where an application has loaded structlog; without one it stays unloaded, which saves a
    server memory and time to start. A class, because it is entered for every event of a stream and a generator-based
    one takes several times as long.
    """

    def __init__(self) -> None:
        structlog = _get_loaded_structlog()
        # by others, in what a provider logs
        self.is_request_logged: bool = structlog is not None and structlog.is_configured()
        self._tokens: list[tuple[Token[str | None], Mapping[str, Any]]] = []
        self._request_id = make_request_id()

    def __enter__(self) -> None:
        structlog = _get_loaded_structlog()
        bound: Mapping[str, Any] = {}
        if structlog is not None:
            bound = structlog.contextvars.bind_contextvars(llm_request_id=self._request_id)
        self._tokens.append((_REQUEST_ID.set(self._request_id), bound))

    def __exit__(self, *_: object) -> None:
        token, bound = self._tokens.pop()
        _REQUEST_ID.reset(token)
        if bound:
            _get_loaded_structlog().contextvars.reset_contextvars(**bound)


def is_log_enabled(level: int = logging.INFO) -> bool:
    """Whether events of this level are logged at all; otherwise what only the log needs is not computed."""
    structlog = _get_loaded_structlog()
    return _STDLIB.isEnabledFor(level) or (structlog is not None and structlog.is_configured())


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event; `llm_request_id` and whatever else structlog's contextvars hold come along."""
    if not is_log_enabled(level):
        return
    structlog = _get_loaded_structlog()
    if structlog is not None:
        fields = {**structlog.contextvars.get_contextvars(), **fields}
        for name in _ARGUMENTS:
            fields.pop(name, None)  # the application's, and no name for a field
    elif (request_id := _REQUEST_ID.get()) is not None:
        fields = {"llm_request_id": request_id, **fields}
    if structlog is not None and structlog.is_configured():
        structlog.get_logger("llm_spec").log(level, event, **fields)
    else:
        _STDLIB.log(level, "%s %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))


def _get_loaded_structlog() -> Any:
    """The module, where it is loaded: whoever has configured it, or bound something, has imported it; else None."""
    return sys.modules.get("structlog")
