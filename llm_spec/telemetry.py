"""Log events, through structlog: one per round and per request, each with the request's id.

An application that has configured structlog gets them through its own processors. In any other they go to the
standard library's logger `llm_spec`, which is silent below WARNING unless the application says otherwise.
Message text is never among the fields, except by `SpeculativeConfig.log_content`.
"""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import AbstractContextManager
from typing import Any, Final

__all__ = ["get_ready", "log_event", "new_request_id", "request_context"]

_STDLIB: Final = logging.getLogger("llm_spec")


def new_request_id() -> str:
    """A short random id that ties the events of one request together."""
    return os.urandom(6).hex()


def get_ready() -> None:
    """Load structlog now: a fifth of this package's import time otherwise, or a delay of the first request."""
    importlib.import_module("structlog.contextvars")


def request_context(request_id: str) -> AbstractContextManager[None]:
    """Bind the id to whatever is logged inside, by this library or by a provider."""
    from structlog.contextvars import bound_contextvars

    return bound_contextvars(request_id=request_id)


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event; `request_id` and whatever else structlog's contextvars hold come along."""
    import structlog

    configured = structlog.is_configured()
    if not configured and not _STDLIB.isEnabledFor(level):
        return
    fields = {**structlog.contextvars.get_contextvars(), **fields}
    if configured:
        structlog.get_logger("llm_spec").log(level, event, **fields)
    else:
        _STDLIB.log(level, "%s %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))
