"""OpenAI's completions: a prompt is continued as it is, without a chat template. Pure.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from llm_spec.contract.checks import check_number
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import StreamEvent, TextDelta
from llm_spec.contract.messages import ChatMessage
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.server.apis.acceptance import build_acceptance_fields
from llm_spec.server.apis.chat_completions import build_chat_usage
from llm_spec.server.apis.encoding import SSE_COMMENT, SSE_DONE, format_sse, get_finish_reason
from llm_spec.server.apis.fields import (
    Body,
    Json,
    ParsedRequest,
    build_chat_request,
    get_num_choices,
    get_object_field,
    get_requested_model_name,
    get_typed_field,
    parse_stop_strings,
)
from llm_spec.server.apis.logprobs import CompletionLogprobsBuilder
from llm_spec.server.problems import HttpProblem

__all__ = ["CompletionStreamEncoder", "build_completion_response", "parse_completion_requests"]

_MAX_TOKENS: Final = 16  # OpenAI's default
_MAX_PROMPTS: Final = 128
_MAX_LOGPROBS: Final = 20
_KNOWN_FIELDS: Final = frozenset(
    {"echo", "logprobs", "max_tokens", "model", "n", "prompt", "stop", "stream", "stream_options"},
)


def parse_completion_requests(body: Body, *, is_local: bool) -> list[ParsedRequest]:
    """Parse a completion's body into a request for each of its prompts.

    Raises InvalidRequestError, which names the wrong field.
    """
    prompts = _get_prompts(body)
    stream, num_choices = get_typed_field(body, "stream", default=False), get_num_choices(body)
    if stream and len(prompts) > 1:
        raise InvalidRequestError(f"prompt has {len(prompts)} texts; only one can be streamed at a time")
    top_logprobs = _get_num_local_logprobs(body) if is_local else None
    # With 0, only the tokens of the text itself have log-probabilities
    logprobs = not is_local and get_typed_field(body, "logprobs", None, int) is not None
    relay_fields = {name: body[name] for name in ("n", "logprobs", "echo") if body.get(name) is not None}
    parsed = ParsedRequest(
        model=get_requested_model_name(body),
        request=build_chat_request(
            body,
            _KNOWN_FIELDS,
            is_local=is_local,
            extra_fields=relay_fields if not is_local and (num_choices > 1 or logprobs) else None,
            messages=(ChatMessage("user", prompts[0]),),
            raw=True,
            max_tokens=get_typed_field(body, "max_tokens", _MAX_TOKENS),
            stop=parse_stop_strings(body),
            top_logprobs=top_logprobs,
        ),
        stream=stream,
        include_usage=get_typed_field(get_object_field(body, "stream_options"), "include_usage", default=False),
        num_choices=num_choices,
        logprobs=logprobs,
    )
    echo = get_typed_field(body, "echo", default=False)
    return [
        replace(
            parsed,
            request=replace(parsed.request, messages=(ChatMessage("user", prompt),)),
            echo=prompt if echo else "",
        )
        for prompt in prompts
    ]


def _get_num_local_logprobs(body: Body) -> int | None:
    """Return how many of the likeliest tokens to report, or None for no log-probabilities."""
    number: int | None = get_typed_field(body, "logprobs", None, int)
    check_number(InvalidRequestError, "logprobs", number, 0, _MAX_LOGPROBS, integer=True)
    if number is not None and body.get("echo"):
        raise InvalidRequestError(
            "echo is set with logprobs; a model in this process has none of its prompt: leave one out"
        )
    return number


def _get_prompts(body: Body) -> list[str]:
    prompt: Any = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]  # pyright: ignore[reportUnknownVariableType]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise InvalidRequestError("prompt must be a text or a list of texts; token ids are not supported here")
    if len(prompts) > _MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(prompts)} texts; it may have at most {_MAX_PROMPTS}")
    return cast("list[str]", prompts)


def build_completion_response(
    results: Sequence[SpeculativeResult], parsed_requests: Sequence[ParsedRequest], *, answer_id: str, model: str
) -> Json:
    """Build the body of whole answers, with one choice for each prompt."""
    choices = [
        {
            "index": index,
            "text": parsed.echo + result.content,
            "logprobs": CompletionLogprobsBuilder().build_next(result.logprobs),
            "finish_reason": get_finish_reason(result),
        }
        for index, (result, parsed) in enumerate(zip(results, parsed_requests, strict=True))
    ]
    usages = [build_chat_usage(result) for result in results]
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        **_sum_usage([usage for usage in usages if usage is not None] if None not in usages else []),
        # As at vLLM, there are no metrics of several answers
        **(build_acceptance_fields(results[0]) if len(results) == 1 else {}),
    }


def _sum_usage(usages: Sequence[Json]) -> Json:
    if not usages:
        return {}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    details = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    usage: Json = {name: sum(usage[name] for usage in usages) for name in names}
    usage["completion_tokens_details"] = {
        name: sum(usage["completion_tokens_details"][name] for usage in usages) for name in details
    }
    return {"usage": usage}


class CompletionStreamEncoder:
    """Encodes a completion as chunks."""

    keep_alive_bytes = SSE_COMMENT

    def __init__(self, parsed: ParsedRequest, *, answer_id: str, model: str) -> None:
        self._parsed = parsed
        self._logprobs = CompletionLogprobsBuilder()
        self._envelope: Json = {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def encode_start(self) -> bytes:
        return self._encode_text_chunk(self._parsed.echo) if self._parsed.echo else b""

    def encode_event(self, event: StreamEvent) -> bytes:
        if not isinstance(event, TextDelta):
            return b""
        return self._encode_text_chunk(event.text, logprobs=self._logprobs.build_next(event.logprobs))

    def encode_end(self, result: SpeculativeResult) -> bytes:
        frames = self._encode_text_chunk("", get_finish_reason(result))
        usage = build_chat_usage(result)
        if self._parsed.include_usage and usage is not None:
            frames += format_sse({**self._envelope, "choices": [], "usage": usage, **build_acceptance_fields(result)})
        return frames + SSE_DONE

    def encode_error(self, problem: HttpProblem) -> bytes:
        return format_sse(problem.to_openai()) + SSE_DONE

    def _encode_text_chunk(self, text: str, finish_reason: str | None = None, logprobs: Json | None = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return format_sse({**self._envelope, "choices": [choice]})
