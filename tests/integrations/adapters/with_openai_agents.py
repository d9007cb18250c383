"""What users of the OpenAI Agents SDK write."""

from __future__ import annotations

import base64
from contextlib import AbstractContextManager
from typing import Any, Final

from agents import Agent, AgentOutputSchema, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from agents.items import MessageOutputItem, ReasoningItem
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

from llm_spec import RetryPolicy, SpeculativeConfig
from llm_spec.integrations.openai_agents import SpeculativeModel

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

__all__ = ["OpenAiAgents"]

_EXTRA_ARGS: Final = ("stop", "seed", "logit_bias", "prediction", "user", "service_tier")


class OpenAiAgents:
    name = "OpenAI Agents"
    error_packages = ("agents", "openai")
    has_one_error = False

    def open(self, scenario: Scenario, url: str, *, own: bool) -> Any:
        if own:
            retries = {} if scenario.max_retries is None else {"max_retries": scenario.max_retries}
            return OpenAIChatCompletionsModel("gpt-4o-mini", AsyncOpenAI(base_url=url, **retries))
        config = None
        if scenario.max_retries is not None:
            config = SpeculativeConfig(retry=RetryPolicy(max_attempts=scenario.max_retries + 1))
        return SpeculativeModel(f"{scenario.dialect}:gpt-4o-mini@{url}", config=config)

    async def close(self, model: Any) -> None:
        if isinstance(model, SpeculativeModel):
            await model.close()

    async def ask(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        agent, items = _build_agent(model, scenario, seen), _build_input(scenario)
        for _ in range(2 if scenario.asks_again else 1):
            if streamed:
                result: Any = Runner.run_streamed(agent, items)
                async for event in result.stream_events():
                    is_piece = event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
                    seen.num_pieces += is_piece
            else:
                result = await Runner.run(agent, items)
            _note(result, seen)
            items = [*result.to_input_list(), {"role": "user", "content": "And tomorrow?"}]

    def ask_blocking(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        if streamed:
            raise NotApplicableError("the framework streams on an event loop alone")
        _note(Runner.run_sync(_build_agent(model, scenario, seen), _build_input(scenario)), seen)

    def use_cache(self) -> AbstractContextManager[None]:
        raise NotApplicableError("the framework has no cache of answers")


def _build_agent(model: Any, scenario: Scenario, seen: Seen) -> Agent[Any]:
    @function_tool(strict_mode=scenario.strict_tools)
    def get_weather(city: str, unit: str = "C") -> str:  # noqa: ARG001 - a strict schema needs it to be required
        """The weather of a city."""
        return record_run(seen, city=city)

    if scenario.output == "tool":
        raise NotApplicableError("the framework has schemas for it")
    output = None
    if scenario.output is not None:
        output = AgentOutputSchema(Place, strict_json_schema=scenario.output == "strict schema")
    uses_tools = scenario.uses_tools or scenario.output == "schema and tools"
    settings = _build_settings(scenario)
    return Agent(
        name="Ann",
        model=model,
        tools=[get_weather] if uses_tools else [],
        output_type=output,
        model_settings=settings,
    )


def _build_settings(scenario: Scenario) -> ModelSettings:
    options = dict(scenario.options)
    extra = {name: options.pop(name) for name in _EXTRA_ARGS if name in options}
    if options.pop("logprobs", None):
        options.setdefault("top_logprobs", 0)
    effort = options.pop("reasoning_effort", None)
    if effort is not None:
        options["reasoning"] = Reasoning(effort=effort)
    if scenario.timeout_s is not None:
        options["timeout"] = scenario.timeout_s
    return ModelSettings(tool_choice=scenario.tool_choice, include_usage=True, extra_args=extra or None, **options)


def _build_input(scenario: Scenario) -> Any:
    if scenario.later_system:
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": EARLIER[0]},
            {"role": "assistant", "content": EARLIER[1]},
            {"role": "system", "content": LATER_SYSTEM},
            {"role": "user", "content": QUESTION},
        ]
    text: Json = {"type": "input_text", "text": QUESTION}
    if scenario.marks_cache:
        return [{"role": "user", "content": [{**text, "cache_control": {"type": "ephemeral"}}]}]
    if scenario.file is None:
        return QUESTION
    return [{"role": "user", "content": [text, _build_file(scenario.file)]}]


def _build_file(kind: FileKind) -> Json:
    match kind:
        case "image":
            url = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"
            return {"type": "input_image", "image_url": url, "detail": "auto"}
        case "PDF":
            data = f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}"
            return {"type": "input_file", "filename": "a.pdf", "file_data": data}
        case "text":
            data = f"data:text/plain;base64,{base64.b64encode(TEXT_FILE).decode()}"
            return {"type": "input_file", "filename": "a.txt", "file_data": data}


def _note(result: Any, seen: Seen) -> None:
    output = result.final_output
    seen.structured = output if isinstance(output, Place) else None
    seen.text = output if isinstance(output, str) else ""
    for item in result.new_items:
        if isinstance(item, ReasoningItem):
            seen.reasoning = "".join(part.text for part in item.raw_item.summary)
        if isinstance(item, MessageOutputItem):
            raw: Any = item.raw_item
            seen.figures = (getattr(raw, "provider_data", None) or {}).get("llm_spec")
            seen.model_name = (getattr(raw, "provider_data", None) or {}).get("model")
            found = [one for part in raw.content for one in getattr(part, "logprobs", None) or ()]
            seen.logprobs = [one.logprob for one in found]
    response = result.raw_responses[-1]
    data = [getattr(item, "provider_data", None) or {} for item in response.output]
    seen.response_id = next((one["response_id"] for one in data if one.get("response_id")), response.response_id)
    usage = response.usage
    seen.usage = {
        "input": usage.input_tokens,
        "output": usage.output_tokens,
        "cached": usage.input_tokens_details.cached_tokens,
        "cache_written": getattr(usage.input_tokens_details, "cache_write_tokens", None),
        "reasoning": usage.output_tokens_details.reasoning_tokens,
    }
