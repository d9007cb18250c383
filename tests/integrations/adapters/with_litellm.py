"""What users of LiteLLM write."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import litellm

from llm_spec.integrations.litellm import SpeculativeLLM, register

from .probes import (
    EARLIER,
    IMAGE,
    LATER_SYSTEM,
    PDF,
    QUESTION,
    TEXT_FILE,
    FileKind,
    Json,
    NotApplicableError,
    Place,
    Scenario,
    Seen,
    record_run,
)

__all__ = ["LiteLlm"]

litellm.suppress_debug_info = True
_numbers = itertools.count()
_PARAMETERS: Final[Json] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class _Model:
    """The keywords that choose a model."""

    keywords: Json
    handler: SpeculativeLLM | None = None


class LiteLlm:
    name = "LiteLLM"
    error_packages = ("litellm",)
    has_one_error = False

    def open(self, scenario: Scenario, url: str, *, own: bool) -> _Model:
        if own:
            name = (
                "gpt-4o-mini" if scenario.dialect == "openai" else "m"
            )  # of which litellm does not know what it takes
            return _Model({"model": f"openai/{name}", "api_base": url, "api_key": "unused"})
        name = f"model-{next(_numbers)}"
        handler = register(model=name, target=f"{scenario.dialect}:gpt-4o-mini@{url}")
        return _Model({"model": f"llm_spec/{name}"}, handler)

    async def close(self, model: _Model) -> None:
        if model.handler is not None:
            await model.handler.aclose()

    async def ask(self, model: _Model, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        messages, keywords = _build_messages(scenario), model.keywords | _build_keywords(scenario, streamed=streamed)
        for _ in range(4):
            answer: Any = await litellm.acompletion(messages=messages, **keywords)
            if streamed:
                answer = _join([_count(chunk, seen) async for chunk in answer], messages)
            if not _go_on(answer, messages, scenario, seen):
                break

    def ask_blocking(self, model: _Model, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        messages, keywords = _build_messages(scenario), model.keywords | _build_keywords(scenario, streamed=streamed)
        for _ in range(4):
            answer: Any = litellm.completion(messages=messages, **keywords)
            if streamed:
                answer = _join([_count(chunk, seen) for chunk in answer], messages)
            if not _go_on(answer, messages, scenario, seen):
                break

    @contextmanager
    def use_cache(self) -> Iterator[None]:
        litellm.cache = litellm.Cache()
        try:
            yield
        finally:
            litellm.cache = None


def _build_keywords(scenario: Scenario, *, streamed: bool) -> Json:
    keywords: Json = dict(scenario.options)
    if streamed:
        keywords |= {"stream": True, "stream_options": {"include_usage": True}}
    if scenario.uses_tools or scenario.output == "schema and tools":
        function: Json = {"name": "get_weather", "description": "The weather of a city.", "parameters": _PARAMETERS}
        if scenario.strict_tools:
            function["strict"] = True
        keywords["tools"] = [{"type": "function", "function": function}]
    if scenario.tool_choice is not None:
        is_name = scenario.tool_choice == "get_weather"
        named = {"type": "function", "function": {"name": scenario.tool_choice}}
        keywords["tool_choice"] = named if is_name else scenario.tool_choice
    if scenario.output == "tool":
        raise NotApplicableError("the framework has schemas for it")
    if scenario.output is not None:
        keywords["response_format"] = Place
    if scenario.timeout_s is not None:
        keywords["timeout"] = scenario.timeout_s
    if scenario.max_retries is not None:
        keywords["max_retries"] = scenario.max_retries
    return keywords


def _build_messages(scenario: Scenario) -> list[Any]:
    if scenario.later_system:
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": EARLIER[0]},
            {"role": "assistant", "content": EARLIER[1]},
            {"role": "system", "content": LATER_SYSTEM},
            {"role": "user", "content": QUESTION},
        ]
    text: Json = {"type": "text", "text": QUESTION}
    if scenario.marks_cache:
        return [{"role": "user", "content": [{**text, "cache_control": {"type": "ephemeral"}}]}]
    if scenario.file is None:
        return [{"role": "user", "content": QUESTION}]
    return [{"role": "user", "content": [text, _build_file(scenario.file)]}]


def _build_file(kind: FileKind) -> Json:
    match kind:
        case "image":
            url = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "PDF":
            data = f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}"
            return {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
        case "text":
            data = f"data:text/plain;base64,{base64.b64encode(TEXT_FILE).decode()}"
            return {"type": "file", "file": {"filename": "a.txt", "file_data": data}}


def _count(chunk: Any, seen: Seen) -> Any:
    seen.num_pieces += any(choice.delta.content for choice in chunk.choices)
    return chunk


def _join(chunks: list[Any], messages: list[Any]) -> Any:
    return litellm.stream_chunk_builder(chunks, messages=messages)


def _go_on(answer: Any, messages: list[Any], scenario: Scenario, seen: Seen) -> bool:
    """Note an answer, run its calls, and say whether there is something to ask next."""
    _note(answer, scenario, seen)
    message = answer.choices[0].message
    messages.append(message)
    if scenario.asks_again:
        messages.append({"role": "user", "content": "And tomorrow?"})
        return len(messages) < 4
    for call in message.tool_calls or ():
        try:
            result = record_run(seen, city=json.loads(call.function.arguments)["city"])
        except ValueError:
            result = "not valid JSON"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return bool(message.tool_calls) and scenario.uses_tools


def _note(answer: Any, scenario: Scenario, seen: Seen) -> None:
    choice, fields = answer.choices[0], answer.choices[0].message.provider_specific_fields or {}
    seen.text = choice.message.content or ""
    seen.reasoning = getattr(choice.message, "reasoning_content", None) or ""
    seen.refusal = getattr(choice.message, "refusal", None) or fields.get("refusal")
    seen.finish_reason = choice.finish_reason
    seen.response_id = answer.id
    seen.model_name = answer.model
    found = getattr(choice, "logprobs", None)
    seen.logprobs = [one.logprob for one in (found.content if found else None) or ()]
    seen.figures = fields.get("llm_spec")
    if scenario.output is not None and seen.text:
        seen.structured = Place.model_validate_json(seen.text)
    usage = getattr(answer, "usage", None)
    if usage is not None:
        read, written = usage.prompt_tokens_details, usage.completion_tokens_details
        written_tokens = [getattr(read, name, None) for name in ("cache_creation_tokens", "cache_write_tokens")]
        seen.usage = {
            "input": usage.prompt_tokens,
            "output": usage.completion_tokens,
            "cached": getattr(read, "cached_tokens", None),
            "cache_written": next((number for number in written_tokens if number), None),
            "reasoning": getattr(written, "reasoning_tokens", None),
        }
    try:
        seen.cost = litellm.completion_cost(answer)
    except Exception:  # noqa: BLE001 - the framework's own for "no price"
        seen.cost = None
