"""What users of LangChain write."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

from llm_spec.integrations.langchain import SpeculativeChatModel

from .probes import (
    EARLIER,
    IMAGE,
    LATER_SYSTEM,
    PDF,
    QUESTION,
    TEXT_FILE,
    FileKind,
    Json,
    Place,
    Scenario,
    Seen,
    record_run,
)

__all__ = ["LangChain"]


class LangChain:
    name = "LangChain"
    error_packages = ("langchain_core",)
    has_one_error = False

    def open(self, scenario: Scenario, url: str, *, own: bool) -> Any:
        fields: Json = {"timeout": scenario.timeout_s, "max_retries": scenario.max_retries}
        if not own:
            return SpeculativeChatModel(target=f"{scenario.dialect}:gpt-4o-mini@{url}", **fields)
        return ChatOpenAI(model="gpt-4o-mini", base_url=url, stream_usage=True, **fields)

    async def close(self, model: Any) -> None:
        if isinstance(model, SpeculativeChatModel):
            await model.aclose()

    async def ask(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        chain, messages = _build_chain(model, scenario, seen), _build_messages(scenario)
        for _ in range(4):
            if streamed:
                answer = _join([_count(piece, seen) async for piece in chain.astream(messages)])
            else:
                answer = await chain.ainvoke(messages)
            if not _go_on(answer, messages, scenario, seen):
                break

    def ask_blocking(self, model: Any, scenario: Scenario, seen: Seen, *, streamed: bool) -> None:
        chain, messages = _build_chain(model, scenario, seen), _build_messages(scenario)
        for _ in range(4):
            if streamed:
                answer = _join([_count(piece, seen) for piece in chain.stream(messages)])
            else:
                answer = chain.invoke(messages)
            if not _go_on(answer, messages, scenario, seen):
                break

    @contextmanager
    def use_cache(self) -> Iterator[None]:
        set_llm_cache(InMemoryCache())
        try:
            yield
        finally:
            set_llm_cache(None)


def _get_tool(seen: Seen) -> StructuredTool:
    def get_weather(city: str, unit: str = "C") -> str:  # noqa: ARG001 - a strict schema needs it to be required
        """The weather of a city."""
        return record_run(seen, city=city)

    return StructuredTool.from_function(get_weather)


def _build_chain(model: Any, scenario: Scenario, seen: Seen) -> Any:
    tool = _get_tool(seen)
    match scenario.output:
        case "schema":
            return model.with_structured_output(Place, method="json_schema")
        case "strict schema":
            return model.with_structured_output(Place, method="json_schema", strict=True)
        case "tool":
            return model.with_structured_output(Place, method="function_calling")
        case "schema and tools":
            return model.with_structured_output(
                Place, method="json_schema", strict=True, tools=[tool], include_raw=True
            )
        case None:
            pass
    options = dict(scenario.options)
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    if scenario.uses_tools:
        if scenario.tool_choice is not None:
            options["tool_choice"] = scenario.tool_choice
        return model.bind_tools([tool], strict=scenario.strict_tools or None, **options)
    return model.bind(**options) if options else model


def _build_messages(scenario: Scenario) -> list[Any]:
    before: list[Any] = []
    if scenario.later_system:
        before = [SystemMessage("Be brief."), HumanMessage(EARLIER[0]), AIMessage(EARLIER[1])]
        before += [SystemMessage(LATER_SYSTEM)]
    if scenario.marks_cache:
        return [HumanMessage([{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}])]
    if scenario.file is None:
        return [*before, HumanMessage(QUESTION)]
    return [HumanMessage([{"type": "text", "text": QUESTION}, _build_file(scenario.file)])]


def _build_file(kind: FileKind) -> Json:
    match kind:
        case "image":
            return {"type": "image", "base64": base64.b64encode(IMAGE).decode(), "mime_type": "image/png"}
        case "PDF":
            data = base64.b64encode(PDF).decode()
            return {"type": "file", "base64": data, "mime_type": "application/pdf", "filename": "a.pdf"}
        case "text":
            return {"type": "text-plain", "text": TEXT_FILE.decode(), "mime_type": "text/plain"}


def _count(piece: Any, seen: Seen) -> Any:
    seen.num_pieces += bool(piece.text) if isinstance(piece, AIMessageChunk) else 0
    return piece


def _join(pieces: list[Any]) -> Any:
    if not isinstance(pieces[0], AIMessageChunk):
        if isinstance(pieces[-1], dict):  # raw and parsed come one after the other
            return {name: value for piece in pieces for name, value in piece.items()}
        return pieces[-1]
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    return joined


def _go_on(answer: Any, messages: list[Any], scenario: Scenario, seen: Seen) -> bool:
    """Note an answer, run its calls, and say whether there is something to ask next."""
    if not isinstance(answer, AIMessage):
        seen.structured = answer["parsed"] if isinstance(answer, dict) else answer
        return False
    _note(answer, seen)
    messages.append(answer)
    if scenario.asks_again:
        messages.append(HumanMessage("And tomorrow?"))
        return len(messages) < 4
    tool = _get_tool(seen)
    messages += [tool.invoke({**call, "type": "tool_call"}) for call in answer.tool_calls]
    messages += [ToolMessage("not valid JSON", tool_call_id=call["id"]) for call in answer.invalid_tool_calls]
    return isinstance(messages[-1], ToolMessage)


def _note(answer: AIMessage, seen: Seen) -> None:
    metadata, usage = answer.response_metadata, answer.usage_metadata
    seen.text = answer.text
    blocks = [block.get("reasoning", "") for block in answer.content_blocks if block["type"] == "reasoning"]
    seen.reasoning = answer.additional_kwargs.get("reasoning_content") or "".join(blocks)
    seen.refusal = answer.additional_kwargs.get("refusal")
    seen.finish_reason = metadata.get("finish_reason")
    seen.response_id = metadata.get("id") or answer.id
    seen.model_name = metadata.get("model_name")
    seen.logprobs = [one["logprob"] for one in (metadata.get("logprobs") or {}).get("content") or ()]
    seen.figures = metadata.get("llm_spec")
    if usage is not None:
        read, written = usage.get("input_token_details", {}), usage.get("output_token_details", {})
        seen.usage = {
            "input": usage["input_tokens"],
            "output": usage["output_tokens"],
            "cached": read.get("cache_read"),
            "cache_written": read.get("cache_creation"),
            "reasoning": written.get("reasoning"),
        }
