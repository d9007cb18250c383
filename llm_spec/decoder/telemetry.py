"""Log events, through structlog: one per round and one per request.

Each has the request's id as `llm_request_id`, because applications and servers use `request_id`
themselves.

If an application has configured structlog, events go through its processors. Otherwise they go to
the standard library's logger `llm_spec`, which is silent below WARNING by default. Message text is
never among the fields, except with `SpeculativeConfig.log_content`.
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

_ARGUMENTS: Final = ("event", "level")  # parameters of structlog's `log`


def make_request_id() -> str:
    """Return a short random id that ties the events of one request together."""
    return f"{random.getrandbits(48):012x}"


class RequestLogContext:
    """Binds a request's id to everything logged inside `with`, by this library or by a provider.

    If an application has loaded structlog, the id is in its context, too. Otherwise structlog stays
    unloaded, which saves a server memory and time to start. It is a class because it is entered for
    every event of a stream, and a generator-based context manager takes several times as long.
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
    """Return True if events of this level are logged; otherwise skip what only the log needs."""
    structlog = _get_loaded_structlog()
    return _STDLIB.isEnabledFor(level) or (structlog is not None and structlog.is_configured())


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event, with `llm_request_id` and structlog's other contextvars."""
    if not is_log_enabled(level):
        return
    structlog = _get_loaded_structlog()
    if structlog is not None:
        fields = {**structlog.contextvars.get_contextvars(), **fields}
        for name in _ARGUMENTS:
            fields.pop(name, None)  # the application's value would clash with a parameter
    elif (request_id := _REQUEST_ID.get()) is not None:
        fields = {"llm_request_id": request_id, **fields}
    if structlog is not None and structlog.is_configured():
        structlog.get_logger("llm_spec").log(level, event, **fields)
    else:
        _STDLIB.log(level, "%s %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))


def _get_loaded_structlog() -> Any:
    """Return structlog if it is loaded, else None.

    An application that configured it, or bound something, has imported it.
    """
    return sys.modules.get("structlog")
