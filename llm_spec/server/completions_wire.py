"""OpenAI's completions: a prompt is continued as it is, without a chat template. Pure.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec.chat import ChatMessage, StreamEvent, TextDelta
from llm_spec.errors import InvalidRequestError
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import (
    Asked,
    Body,
    Json,
    chat_request,
    read_model,
    read_num_choices,
    read_stop,
    table,
    wanted,
)
from llm_spec.server.chat_wire import chat_usage
from llm_spec.server.encoding import COMMENT, DONE, finish_reason_of, sse
from llm_spec.server.problems import Problem

__all__ = ["CompletionEncoder", "completion_body", "read_completions"]

_MAX_TOKENS: Final = 16  # OpenAI's default
_MAX_PROMPTS: Final = 128
_KNOWN: Final = frozenset(
    {"echo", "logprobs", "max_tokens", "model", "n", "prompt", "stop", "stream", "stream_options"},
)


def read_completions(body: Body, *, is_local: bool) -> list[Asked]:
    """A completion's body, a request for each of its prompts; raises InvalidRequestError naming the wrong field."""
    prompts = _prompts(body)
    stream, num_choices = wanted(body, "stream", default=False), read_num_choices(body)
    if stream and len(prompts) > 1:
        raise InvalidRequestError(f"prompt has {len(prompts)} texts; one at a time can be streamed")
    logprobs = wanted(body, "logprobs", None, int) is not None  # 0 asks for those of the text itself
    relayed = {name: body[name] for name in ("n", "logprobs", "echo") if body.get(name) is not None}
    asked = Asked(
        model=read_model(body),
        request=chat_request(
            body,
            _KNOWN,
            is_local=is_local,
            more=relayed if num_choices > 1 or logprobs else None,
            messages=(ChatMessage("user", prompts[0]),),
            raw=True,
            max_tokens=wanted(body, "max_tokens", _MAX_TOKENS),
            stop=read_stop(body),
        ),
        stream=stream,
        include_usage=wanted(table(body, "stream_options"), "include_usage", default=False),
        num_choices=num_choices,
        logprobs=logprobs,
    )
    echo = wanted(body, "echo", default=False)
    return [
        replace(
            asked,
            request=replace(asked.request, messages=(ChatMessage("user", prompt),)),
            echo=prompt if echo else "",
        )
        for prompt in prompts
    ]


def _prompts(body: Body) -> list[str]:
    prompt: Any = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]  # pyright: ignore[reportUnknownVariableType]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise InvalidRequestError("prompt must be a text or a list of texts; token ids are not taken here")
    if len(prompts) > _MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(prompts)} texts; it may have {_MAX_PROMPTS}")
    return cast("list[str]", prompts)


def completion_body(
    results: Sequence[SpeculativeResult], asked: Sequence[Asked], *, answer_id: str, model: str
) -> Json:
    """Whole answers, one choice for each prompt."""
    choices = [
        {"index": index, "text": one.echo + result.content, "logprobs": None, "finish_reason": finish_reason_of(result)}
        for index, (result, one) in enumerate(zip(results, asked, strict=True))
    ]
    usages = [chat_usage(result) for result in results]
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        **_summed([usage for usage in usages if usage is not None] if None not in usages else []),
    }


def _summed(usages: Sequence[Json]) -> Json:
    if not usages:
        return {}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    details = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    usage: Json = {name: sum(usage[name] for usage in usages) for name in names}
    usage["completion_tokens_details"] = {
        name: sum(usage["completion_tokens_details"][name] for usage in usages) for name in details
    }
    return {"usage": usage}


class CompletionEncoder:
    """A completion in chunks."""

    keep_alive = COMMENT

    def __init__(self, asked: Asked, *, answer_id: str, model: str) -> None:
        self._asked = asked
        self._envelope: Json = {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def begin(self) -> bytes:
        return self._chunk(self._asked.echo) if self._asked.echo else b""

    def event(self, event: StreamEvent) -> bytes:
        return self._chunk(event.text) if isinstance(event, TextDelta) else b""

    def end(self, result: SpeculativeResult) -> bytes:
        told = self._chunk("", finish_reason_of(result))
        usage = chat_usage(result)
        if self._asked.include_usage and usage is not None:
            told += sse({**self._envelope, "choices": [], "usage": usage})
        return told + DONE

    def failure(self, problem: Problem) -> bytes:
        return sse(problem.to_openai()) + DONE

    def _chunk(self, text: str, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return sse({**self._envelope, "choices": [choice]})
