"""Logs a request's start, progress and end; message text only if `log_content` is set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from llm_spec.contract.errors import DraftError, LlmSpecError
from llm_spec.contract.events import Fallback, FallbackCause, GuaranteeWeakened, Progress, Retry, Round
from llm_spec.decoder.attempts import TargetCall
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.decoder.telemetry import is_log_enabled, log_event
from llm_spec.strategies.registry import StrategyEntry

__all__ = ["log_progress", "log_request_end", "log_request_failure", "log_request_start"]

_FALLBACK_EVENTS: Final[Mapping[FallbackCause, str]] = {
    "draft_failed": "draft_failed",
    "refused": "speculation_refused",
    "target": "speculation_unsupported",
}


def log_request_start(strategy: StrategyEntry, target_call: TargetCall) -> None:
    """Log a request with the strategy chosen for it."""
    if not is_log_enabled():
        return
    request = target_call.recorder.request
    content: dict[str, Any] = {}
    if target_call.config.log_content:
        content = {"messages": [m.to_openai() for m in request.messages]}
    with target_call.log_context:
        log_event(
            "request_started",
            strategy=strategy.name,
            target=target_call.target.name,
            draft=target_call.recorder.draft_name,
            num_messages=len(request.messages),
            max_tokens=request.max_tokens,
            **content,
        )


def log_progress(event: Progress, target_call: TargetCall) -> None:
    """Log a fallback, a retry, a weaker guarantee or, at the debug level, a round."""
    if isinstance(event, Fallback | Retry):
        # other people's errors may quote the prompt; their type cannot
        kind = event.reason.partition(":")[0]
        whole = target_call.config.log_content or kind == DraftError.__name__
        what = "target_asked_again"
        if isinstance(event, Fallback):
            what = _FALLBACK_EVENTS[event.cause]
        with target_call.log_context:
            log_event(what, level=logging.WARNING, reason=event.reason if whole else kind)
    elif isinstance(event, GuaranteeWeakened):
        with target_call.log_context:
            log_event("guarantee_weakened", guarantee=event.guarantee, reason=event.reason)
    elif isinstance(event, Round) and is_log_enabled(logging.DEBUG):
        with target_call.log_context:
            log_event(
                "round",
                level=logging.DEBUG,
                index=event.index,
                num_draft_tokens=event.num_draft_tokens,
                num_accepted_tokens=event.num_accepted_tokens,
                draft_ms=round(event.draft_s * 1e3, 3),
                verify_ms=round(event.verify_s * 1e3, 3),
            )


def log_request_failure(error: BaseException | None, target_call: TargetCall) -> None:
    """Log that a request was cancelled, or the type of the error that ended it."""
    with target_call.log_context:
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            log_event("request_cancelled")
        elif isinstance(error, LlmSpecError):
            log_event("request_failed", level=logging.ERROR, error=type(error).__name__)


def log_request_end(result: SpeculativeResult, target_call: TargetCall) -> None:
    """Log the figures of an answer that has come to its end."""
    if not is_log_enabled():
        return
    content: dict[str, Any] = {"content": result.content} if target_call.config.log_content else {}
    with target_call.log_context:
        log_event(
            "request_finished",
            strategy=result.strategy,
            plain_reason=result.plain_reason,
            speedup=result.speedup,
            finish_reason=result.finish_reason,
            stopped_by=result.stopped_by,
            total_s=round(result.timings.total_s, 6),
            lookahead=dict(result.lookahead),
            **result.stats.to_dict(),
            **content,
        )
