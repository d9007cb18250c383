"""Tools through LiteLLM on a model in this process: the same transcript with a draft and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("litellm")

import litellm
from support.tool_models import FORMATS_BY_NAME, write_tool_model

from llm_spec.contract.formats import FORMATS
from llm_spec.integrations.litellm import register

# it warns of its own models; as errors those would become errors of its calls
pytestmark = pytest.mark.filterwarnings("ignore")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Bern"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = {"role": "user", "content": "Weather in Rome?"}
FIELDS: Any = {
    "user": "u",
    "store": False,
    "service_tier": "auto",
    "n": 1,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
async def test_a_loop_with_a_tool(tmp_path: Path, row: Any, is_streamed: bool) -> None:
    """A call, its result and an answer, with what clients of OpenAI's API send beside."""
    folder = write_tool_model(tmp_path / "model", row)
    transcripts = [await run_loop(folder, draft, is_streamed) for draft in (None, "lookup+builtin:draft")]
    assert transcripts[0] == transcripts[1]


async def run_loop(folder: Path, draft: str | None, is_streamed: bool) -> list[Any]:
    async with register(target=f"onnx:{folder}", draft=draft):
        options: Any = {"model": "llm_spec/any", "tools": [TOOL], "stream": is_streamed, **FIELDS}
        first = await ask(
            messages=[QUESTION], tool_choice="required", parallel_tool_calls=False, max_tokens=200, **options
        )
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        [call] = message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Bern")
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        second = await ask(messages=[QUESTION, message, result], tool_choice="none", max_tokens=12, **options)
        assert second.choices[0].message.content
        return [call.id, call.function.name, call.function.arguments, second.choices[0].message.content]


async def ask(*, stream: bool, **options: Any) -> Any:
    answer = await litellm.acompletion(stream=stream, **options)
    return litellm.stream_chunk_builder([chunk async for chunk in answer]) if stream else answer


async def test_what_a_model_here_cannot_serve_is_a_bad_request(tmp_path: Path) -> None:
    folder = write_tool_model(tmp_path / "model", FORMATS_BY_NAME["hermes"])
    async with register(target=f"onnx:{folder}"):
        with pytest.raises(litellm.BadRequestError, match=r"mirostat is set; .* cannot serve it"):
            await litellm.acompletion(model="llm_spec/any", messages=[QUESTION], mirostat=1)
