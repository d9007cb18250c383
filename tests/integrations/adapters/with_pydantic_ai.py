"""What users of pydantic-ai write."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from pydantic_ai import Agent, BinaryContent, CachePoint, NativeOutput, Tool, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from llm_spec.integrations.pydantic_ai import SpeculativeModel

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

__all__ = ["PydanticAi"]

_SETTINGS: Final = {
    "stop": "stop_sequences",
    "logprobs": "openai_logprobs",
    "top_logprobs": "openai_top_logprobs",
    "reasoning_effort": "openai_reasoning_effort",
    "prediction": "openai_prediction",
    "user": "openai_user",
    "service_tier": "openai_service_tier",
}
_FILES: Final = {
    "image": BinaryContent(IMAGE, media_type="image/png"),
    "PDF": BinaryContent(PDF, media_type="application/pdf"),
    "text": BinaryContent(TEXT_FILE, media_type="text/plain"),
}


class PydanticAi:
    name = "pydantic-ai"
    error_packages = ("pydantic_ai",)
    has_one_error = False

    def open(self, scenario: Scenario, url: str, *, own: bool) -> Any:
        if not own:
            return SpeculativeModel(f"{scenario.dialect}:gpt-4o-mini@{url}")
        return OpenAIChatModel("gpt-4o-mini", provider=OpenAIProvider(base_url=url, api_key="unused"))

    async def close(self, model: Any) -> None:
        if isinstance(model, SpeculativeModel):
            await model.aclose()

    async def ask(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        agent, keywords = _build_agent(model, scenario, seen), _build_keywords(scenario)
        if scenario.tool_choice in ("required", "get_weather"):  # an agent could not end
            await _request_directly(model, keywords["model_settings"], streamed=streamed)
            return
        history: list[ModelMessage] = keywords.pop("message_history")
        prompt = _build_prompt(scenario)
        for _ in range(2 if scenario.asks_again else 1):
            if streamed:
                async with agent.run_stream(prompt, message_history=history, **keywords) as run:
                    if scenario.output is None:
                        async for piece in run.stream_text(delta=True, debounce_by=None):
                            seen.num_pieces += bool(piece)
                    _note(run.response, await run.get_output(), seen)
                history = run.all_messages()
            else:
                result = await agent.run(prompt, message_history=history, **keywords)
                _note(result.response, result.output, seen)
                history = result.all_messages()
            prompt = "And tomorrow?"

    def ask_blocking(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        agent, prompt = _build_agent(model, scenario, seen), _build_prompt(scenario)
        if streamed:
            run = agent.run_stream_sync(prompt, **_build_keywords(scenario))
            seen.num_pieces = len(list(run.stream_text(delta=True)))
            _note(run.response, run.get_output(), seen)
        else:
            result = agent.run_sync(prompt, **_build_keywords(scenario))
            _note(result.response, result.output, seen)

    def use_cache(self) -> AbstractContextManager[None]:
        raise NotApplicableError("the framework has no cache of answers")


async def _request_directly(model: Any, settings: Any, *, streamed: bool) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = ToolDefinition(name="get_weather", parameters_json_schema=parameters)
    options = {
        "model_settings": settings,
        "model_request_parameters": ModelRequestParameters(function_tools=[tool], allow_text_output=True),
    }
    messages = [ModelRequest.user_text_prompt(QUESTION)]
    if not streamed:
        await model_request(model, messages, **options)
        return
    async with model_request_stream(model, messages, **options) as events:
        async for _ in events:
            pass


def _build_agent(model: Any, scenario: Scenario, seen: Seen) -> Agent[None, Any]:
    def get_weather(city: str, unit: str = "C") -> str:  # noqa: ARG001 - a strict schema needs it to be required
        """The weather of a city."""
        return record_run(seen, city=city)

    outputs: dict[str | None, Any] = {
        "schema": NativeOutput(Place),
        "strict schema": NativeOutput(Place, strict=True),
        "tool": ToolOutput(Place),
        "schema and tools": NativeOutput(Place),
    }
    uses_tools = scenario.uses_tools or scenario.output == "schema and tools"
    tools = [Tool(get_weather, strict=scenario.strict_tools or None)] if uses_tools else []
    return Agent(model, tools=tools, output_type=outputs.get(scenario.output, str))


def _build_keywords(scenario: Scenario) -> dict[str, Any]:
    if "metadata" in scenario.options:
        raise NotApplicableError("the framework has no setting for it but `extra_body`")
    settings = {_SETTINGS.get(name, name): value for name, value in scenario.options.items()}
    if scenario.tool_choice is not None:
        names = {"auto", "none", "required"}
        settings["tool_choice"] = scenario.tool_choice if scenario.tool_choice in names else [scenario.tool_choice]
    if scenario.timeout_s is not None:
        settings["timeout"] = scenario.timeout_s
    if scenario.max_retries is not None:
        settings["max_retries"] = scenario.max_retries
    return {"model_settings": settings, "message_history": _build_history(scenario)}


def _build_history(scenario: Scenario) -> list[ModelMessage]:
    if not scenario.later_system:
        return []
    return [
        ModelRequest(parts=[SystemPromptPart("Be brief."), UserPromptPart(EARLIER[0])]),
        ModelResponse(parts=[TextPart(EARLIER[1])]),
        ModelRequest(parts=[SystemPromptPart(LATER_SYSTEM)]),
    ]


def _build_prompt(scenario: Scenario) -> Any:
    if scenario.marks_cache:
        return [QUESTION, CachePoint()]
    return QUESTION if scenario.file is None else [QUESTION, _FILES[scenario.file]]


def _note(response: ModelResponse, output: Any, seen: Seen) -> None:
    details = response.provider_details or {}
    seen.text = "".join(part.content for part in response.parts if isinstance(part, TextPart))
    seen.reasoning = "".join(part.content for part in response.parts if isinstance(part, ThinkingPart))
    seen.structured = output if isinstance(output, Place) else None
    seen.finish_reason = response.finish_reason
    seen.response_id = response.provider_response_id
    seen.model_name = response.model_name
    seen.logprobs = [one["logprob"] for one in details.get("logprobs") or ()]
    seen.figures = details if "acceptance_rate" in details else None
    usage = response.usage
    seen.usage = {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.cache_read_tokens,
        "cache_written": usage.cache_write_tokens,
        "reasoning": usage.details.get("reasoning_tokens"),
    }
    try:
        seen.cost = float(response.cost().total_price)
    except (LookupError, AssertionError):
        seen.cost = None
