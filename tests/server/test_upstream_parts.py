"""What an answer has beside text and functions: custom tools, refusals, details, stop strings, codes; by SDK, too."""

from __future__ import annotations

from typing import Any, Final

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel
from support.serving import ask, serving
from support.upstream import DONE, Upstream, choice, event, upstream

from llm_spec.server import ModelConfig

pytestmark = pytest.mark.virtual_clock

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final[Any] = [{"role": "user", "content": "hi"}]
CUSTOM_TOOLS: Final[Any] = [{"type": "custom", "custom": {"name": "apply_patch"}}]
PATCH: Final = "*** Begin \\ud83d 😀\n*** End"


def custom_call(**fields: Any) -> bytes:
    return choice({"tool_calls": [{"index": 0, **fields}]})


CUSTOM_FRAMES: Final = (
    custom_call(id="a", type="custom", custom={"name": "apply_patch", "input": "*** Begin \\ud83d \ud83d"}),
    custom_call(custom={"input": "\ude00\n*** End"}),
    choice(finish="tool_calls"),
    DONE,
)


def openai_of(said: Upstream) -> AsyncOpenAI:
    assert said.server is not None
    return AsyncOpenAI(base_url=f"{said.server.url}/v1", api_key="any", max_retries=0)


def anthropic_of(said: Upstream) -> AsyncAnthropic:
    assert said.server is not None
    return AsyncAnthropic(base_url=said.server.url, api_key="any", max_retries=0)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}], ids=["chat", "relay"])
async def test_custom_tools(fields: dict[str, Any]) -> None:
    """A custom tool's call comes as one, its input as the model wrote it; and goes back to the target."""
    async with upstream() as said, openai_of(said) as client:
        said.say(*CUSTOM_FRAMES)
        more: Any = {"model": "fast", "tools": CUSTOM_TOOLS, **fields}
        answer = await client.chat.completions.create(messages=MESSAGES, **more)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        (call,) = calls
        assert call.type == "custom"
        assert (call.id, call.custom.name, call.custom.input) == ("a", "apply_patch", PATCH)
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **more)
        shown = [c.choices[0].delta.tool_calls[0].model_dump() async for c in stream if c.choices[0].delta.tool_calls]
        assert {piece.get("type") for piece in shown} == {"custom", None}
        assert "".join(piece["custom"]["input"] for piece in shown) == PATCH
        history = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": "a", "content": "done"}]
        await client.chat.completions.create(messages=history, **more)
        assert said.bodies[-1]["messages"][1]["tool_calls"][0] == {
            "id": "a",
            "type": "custom",
            "custom": {"name": "apply_patch", "input": PATCH},
        }


@pytest.mark.parametrize("target", ["builtin:target", "anthropic:claude-haiku-4-5@http://127.0.0.1:9"])
async def test_custom_tools_are_refused_by_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model in this process, and by Anthropic's API, which take functions alone."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-any")
    async with serving(ModelConfig(target=target)) as server:
        for stream in (False, True):
            reply = await server.chat(tools=CUSTOM_TOOLS, stream=stream)
            assert reply.status == 400
            assert "tools" in reply.error["message"]
            assert "custom" in reply.error["message"]


class Form(BaseModel):
    a: int


REFUSAL: Final = (
    choice({"role": "assistant", "content": None, "refusal": "I cannot"}),
    choice({"refusal": " help \ud83d"}),
    choice(finish="stop"),
    DONE,
)
REFUSED: Final = "I cannot help \ufffd"


async def test_a_refusal_is_one_to_each_sdk() -> None:
    """Chat: `refusal`, so that parse() works; responses: a part of that type; messages: the text, and a stop reason."""
    async with upstream() as said, openai_of(said) as client, anthropic_of(said) as other:
        said.say(*REFUSAL)
        parsed = await client.chat.completions.parse(model="fast", messages=MESSAGES, response_format=Form)
        message = parsed.choices[0].message
        assert (message.refusal, message.content, message.parsed) == (REFUSED, None, None)
        for fields in ({}, {"logprobs": True}):
            async with client.chat.completions.stream(model="fast", messages=MESSAGES, **fields) as chat:  # type: ignore[arg-type]
                final = (await chat.get_final_completion()).choices[0]
            assert (final.message.refusal, final.finish_reason) == (REFUSED, "stop")
        response = await client.responses.create(model="fast", input="hi")
        async with client.responses.stream(model="fast", input="hi") as events:
            streamed = await events.get_final_response()
        for found in (response, streamed):
            assert found.status == "completed"
            (item,) = found.output
            assert item.type == "message"
            assert [(part.type, getattr(part, "refusal", None)) for part in item.content] == [("refusal", REFUSED)]
        whole = await other.messages.create(model="fast", messages=MESSAGES, max_tokens=9)
        async with other.messages.stream(model="fast", messages=MESSAGES, max_tokens=9) as blocks:
            final_message = await blocks.get_final_message()
        for shown in (whole, final_message):
            assert (shown.content[0].type, shown.stop_reason) == ("text", "refusal")
            assert getattr(shown.content[0], "text", None) == REFUSED


CITED: Final = {"type": "url_citation", "url_citation": {"url": "https://example.com/a", "title": "t"}}
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}], ids=["chat", "relay"])
async def test_other_parts_are_passed_on(fields: dict[str, Any]) -> None:
    """Annotations, images and audio: whole they are put together, streamed they come as they are."""
    async with upstream() as said:
        assert said.server is not None
        said.say(
            choice({"role": "assistant", "content": "cited", "images": [IMAGE]}),
            choice({"annotations": [CITED], "audio": {"id": "au", "transcript": "he", "data": "QU"}}),
            choice({"annotations": [CITED], "audio": {"transcript": "llo", "data": "JD", "expires_at": 7}}),
            choice(finish="stop"),
            DONE,
        )
        message = (await said.server.chat(**fields)).json["choices"][0]["message"]
        assert (message["content"], message["annotations"], message["images"]) == ("cited", [CITED, CITED], [IMAGE])
        assert message["audio"] == {"id": "au", "transcript": "hello", "data": "QUJD", "expires_at": 7}
        chunks = (await said.server.chat(stream=True, **fields)).chunks
        shown = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert [delta["annotations"] for delta in shown if "annotations" in delta] == [[CITED], [CITED]]
        assert "".join(delta["audio"]["data"] for delta in shown if "audio" in delta) == "QUJD"


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize("value", ["BB", "CC", 151645, None, ["BB"]])
async def test_which_stop_string(field: str, value: object) -> None:
    """vLLM and SGLang say it; the id of a token, and what the request does not have, are the model's own end."""
    async with upstream() as said, anthropic_of(said) as client:
        assert said.server is not None
        said.say(choice({"content": "ok"}), choice({"content": ""}, "stop", **{field: value}), DONE)
        answer = await client.messages.create(model="fast", messages=MESSAGES, max_tokens=9, stop_sequences=["BB"])
        expected = ("stop_sequence", "BB") if value == "BB" else ("end_turn", None)
        assert (answer.stop_reason, answer.stop_sequence) == expected
        relayed = (await said.server.chat(stop=["BB"], logprobs=True)).json["choices"][0]
        assert relayed.get(field) == value


LONG: Final = (
    {"error": {"message": "This model's maximum context length is 4096 tokens. However, you requested 9", "code": 400}},
    {"error": {"message": "The decoder prompt (length 9000) is longer than the maximum model length of 4096."}},
    {"object": "error", "message": "The input (9000 tokens) is longer than the model's context length (4096 tokens)."},
    {"object": "error", "message": "Requested token count exceeds the model's maximum context length of 4096 tokens."},
    {"error": {"code": 400, "message": "too much", "type": "exceed_context_size_error"}},
    {"error": {"message": "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it"}},
    {"error": {"message": "the input length exceeds the context length", "type": "invalid_request_error"}},
    {"error": "Input validation error: `inputs` must have less than 4096 `tokens`. Given: 9000", "error_type": "x"},
    {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9000 `inputs`"},
    {"error": "Trying to keep the first 9000 tokens when context the overflows. However, the model is loaded with"},
    {"object": "error", "message": "too long", "code": 40303},
    {"detail": "Prompt contains 9000 tokens and 0 draft tokens, too large for model with 4096 maximum context length"},
    {"error": {"message": "prompt is too long: 9000 tokens > 4096 maximum", "type": "invalid_request_error"}},
    {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}},
)
OTHER: Final = (
    {"error": {"message": 'Invalid value: "This model\'s maximum context length is 4096 tokens"'}},
    {"error": {"message": "the user wrote: prompt is too long: 9 tokens"}},
    {"error": {"message": "messages: the input exceeds what is allowed", "code": "invalid_value"}},
)


@pytest.mark.parametrize("error", [*LONG, *OTHER])
async def test_the_code_of_a_prompt_that_is_too_long(error: dict[str, Any]) -> None:
    """Each server has words of its own; what a user wrote, and a server quotes, is none of them."""
    async with upstream() as said, openai_of(said) as client:
        said.status = 400
        said.say(event(error)[len(b"data: ") :], content_type="application/json")
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="fast", messages=MESSAGES)
        code = "context_length_exceeded" if error in LONG else (error["error"].get("code"))
        assert caught.value.code == code
        assert said.server is not None
        reply = await said.server.post("/v1/messages", ask("/v1/messages"))
        assert reply.error.get("details", {}).get("error_code") == code


async def test_a_call_in_its_older_form() -> None:
    """`function_call`: a call like any other to all APIs, and in that form to who has requested it so."""
    async with upstream() as said:
        assert said.server is not None
        said.say(
            choice({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":'}}),
            choice({"function_call": {"arguments": "1}"}}),
            choice(finish="function_call"),
            DONE,
        )
        (found,) = (await said.server.chat()).json["choices"]
        (call,) = found["message"]["tool_calls"]
        assert (call["function"], found["finish_reason"]) == ({"name": "f", "arguments": '{"a":1}'}, "tool_calls")
        block = (await said.server.post("/v1/messages", ask("/v1/messages"))).json["content"][-1]
        assert (block["name"], block["input"]) == ("f", {"a": 1})
        functions = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
        (found,) = (await said.server.chat(functions=functions)).json["choices"]
        assert found["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
        assert ("tool_calls" in found["message"], found["finish_reason"]) == (False, "function_call")
        chunks = (await said.server.chat(functions=functions, stream=True)).chunks
        shown = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
        assert "".join(piece.get("arguments", "") for piece in shown) == '{"a":1}'
        assert [piece["name"] for piece in shown if "name" in piece] == ["f"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
        relayed = (await said.server.chat(logprobs=True)).json["choices"][0]
        assert relayed["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
        assert relayed["finish_reason"] == "function_call"
