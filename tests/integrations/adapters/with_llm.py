"""What users of `llm`'s Python library write; the command does the same."""

from __future__ import annotations

import itertools
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import llm
from llm.default_plugins.openai_models import AsyncChat, Chat
from llm.parts import Message, TextPart

from llm_spec.integrations.llm_plugin import AsyncSpeculativeModel, ModelSpec, SpeculativeModel

from .probes import (
    EARLIER,
    IMAGE,
    LATER_SYSTEM,
    PDF,
    QUESTION,
    TEXT_FILE,
    NotApplicableError,
    Place,
    Scenario,
    Seen,
    record_run,
)

__all__ = ["LlmPlugin"]

_numbers = itertools.count()
_OWN: Final = {"supports_tools": True, "supports_schema": True, "vision": True, "reasoning": True, "service_tier": True}
_FILES: Final = {
    "image": ("image/png", IMAGE),
    "PDF": ("application/pdf", PDF),
    "text": ("text/plain", TEXT_FILE),
}
_NO_OPTIONS: Final = ("extra_body", "extra_headers", "user", "metadata", "prediction")


@dataclass(frozen=True)
class _Models:
    """One model for blocking calls, one for a loop."""

    blocking: Any
    asynchronous: Any


class LlmPlugin:
    name = "`llm`"
    error_packages = ("llm",)
    has_one_error = True

    def open(self, scenario: Scenario, url: str, *, own: bool) -> _Models:
        if own:
            keywords: dict[str, Any] = {"api_base": url, "key": "unused", **_OWN}
            return _Models(Chat("gpt-4o-mini", **keywords), AsyncChat("gpt-4o-mini", **keywords))
        target = f"{scenario.dialect}:gpt-4o-mini@{url}"
        spec = ModelSpec(name=f"model-{next(_numbers)}", target=target, images=True)
        return _Models(SpeculativeModel(spec), AsyncSpeculativeModel(spec))

    async def close(self, model: _Models) -> None:
        """The plugin's models end with the process."""

    async def ask(self, model: _Models, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        conversation, keywords = model.asynchronous.conversation(), _build_keywords(scenario, streamed=streamed)
        if scenario.uses_tools:

            async def get_weather(city: str, unit: str = "C") -> str:  # noqa: ARG001 - as in the other frameworks
                """The weather of a city."""
                return record_run(seen, city=city)

            chain = conversation.chain(QUESTION, tools=[get_weather], **keywords)
            async for response in chain.responses():
                seen.num_pieces += len([piece async for piece in response if piece])
                await _note(response, scenario, seen)
            return
        prompts = (None if scenario.later_system else QUESTION, *(("And tomorrow?",) if scenario.asks_again else ()))
        for prompt in prompts:
            response = conversation.prompt(prompt, **keywords)
            seen.num_pieces = len([piece async for piece in response if piece])
            await _note(response, scenario, seen)

    def ask_blocking(self, model: _Models, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        response = model.blocking.prompt(QUESTION, **_build_keywords(scenario, streamed=streamed))
        seen.num_pieces = len([piece for piece in response if piece])
        seen.text = response.text()

    def use_cache(self) -> AbstractContextManager[None]:
        raise NotApplicableError("the framework has no cache of answers")


def _build_keywords(scenario: Scenario, *, streamed: bool) -> dict[str, Any]:
    _refuse_what_llm_has_not(scenario)
    options: dict[str, Any] = dict(scenario.options)
    if "stop" in options:
        (options["stop"],) = options["stop"]
    if options.pop("logprobs", None):
        options.setdefault("top_logprobs", 0)
    if scenario.tool_choice is not None:
        options["tool_choice"] = scenario.tool_choice
    keywords: dict[str, Any] = {"options": options, "stream": streamed}
    if scenario.output is not None:
        keywords["schema"] = Place
    if scenario.later_system:
        said = [("system", "Be brief."), ("user", EARLIER[0]), ("assistant", EARLIER[1]), ("system", LATER_SYSTEM)]
        said.append(("user", QUESTION))
        keywords["messages"] = [Message(role=role, parts=[TextPart(text=text)]) for role, text in said]
    if scenario.file is not None:
        kind, content = _FILES[scenario.file]
        keywords["attachments"] = [llm.Attachment(type=kind, content=content)]
    return keywords


def _refuse_what_llm_has_not(scenario: Scenario) -> None:
    if scenario.timeout_s is not None or scenario.max_retries or not scenario.options.keys().isdisjoint(_NO_OPTIONS):
        raise NotApplicableError("the framework's models have no such option")
    if scenario.strict_tools or scenario.output == "strict schema":
        raise NotApplicableError("the framework has no word for it")
    if scenario.output in ("tool", "schema and tools"):
        raise NotApplicableError("the framework has schemas for it, and uses them without tools")
    if scenario.marks_cache:
        raise NotApplicableError("the framework's prompts are texts")


async def _note(response: Any, scenario: Scenario, seen: Seen) -> None:
    seen.text = await response.text()
    found: dict[str, Any] = response.response_json or {}
    messages = await response.messages() if callable(response.messages) else response.messages
    parts = [part for message in messages for part in message.parts]
    seen.reasoning = "".join(part.text for part in parts if type(part).__name__ == "ReasoningPart")
    seen.finish_reason = found.get("finish_reason")
    seen.response_id = found.get("id")
    seen.model_name = response.resolved_model or found.get("model")
    seen.logprobs = [one["logprob"] for one in (found.get("logprobs") or {}).get("content") or ()]
    seen.figures = found if "acceptance_rate" in found else None
    if scenario.output is not None:
        seen.structured = Place(**json.loads(seen.text))
    usage = await response.usage()
    details = _flatten(usage.details or {})
    seen.usage = {
        "input": usage.input,
        "output": usage.output,
        "cached": details.get("cached_tokens"),
        "cache_written": details.get("cache_write_tokens"),
        "reasoning": details.get("reasoning_tokens"),
    }


def _flatten(details: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in details.items():
        flat |= _flatten(value) if isinstance(value, dict) else {name: value}
    return flat
