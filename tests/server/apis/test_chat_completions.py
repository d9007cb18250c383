"""Chat completions on the wire: what OpenAI's clients rely on, one promise per test."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from support.serving import PAIR, RULES, ask, discover_features, remote, serving

from llm_spec import SpeculativeConfig
from llm_spec.server import ModelConfig
from llm_spec.testing.server import ScriptedModelServer, ServerFaults

PATH: Final = "/v1/chat/completions"
USAGE: Final = {"include_usage": True}
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def test_a_whole_answer_has_every_field_of_openais() -> None:
    """A client that reads any field of a completion finds it."""
    async with serving() as server:
        reply = await server.chat()
    body = reply.json
    assert reply.status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fast")
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "You said: Good morning", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


async def test_a_stream_has_one_id_and_one_end() -> None:
    """All chunks are of one answer; the role comes first, one finish reason last, then [DONE] and nothing more."""
    async with serving() as server:
        reply = await server.chat(stream=True)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    chunks = reply.chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reply.text == "You said: Good morning"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert reply.data.endswith(b"data: [DONE]\n\n")
    assert [frame.data for frame in reply.frames].count("[DONE]") == 1


async def test_usage_comes_last_and_only_when_asked_for() -> None:
    """The usage chunk has no choices and is the last before [DONE]; all chunks before it say that it is to come."""
    async with serving() as server:
        silent = await server.chat(stream=True)
        told = await server.chat(stream=True, stream_options=USAGE)
        whole = await server.chat()
    assert all("usage" not in chunk and chunk["choices"] for chunk in silent.chunks)
    *before, last = told.chunks
    assert last["choices"] == []
    assert last["usage"] == whole.json["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)


async def test_calls_come_in_pieces_with_index_id_and_name() -> None:
    """Every tool delta has its index; id, type and name come with the first, and only there."""
    async with serving() as server:
        reply = await server.chat("Add the numbers 3 and 4.", tools=[ADD], stream=True)
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert len(calls) > 1
    assert {call["index"] for call in calls} == {0}
    assert (calls[0]["type"], calls[0]["function"]["name"]) == ("function", "add_numbers")
    assert calls[0]["id"]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 3, "b": 4}
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_whole_call_says_so() -> None:
    """An answer that is a call has no content, and its finish reason is that of a call."""
    async with serving() as server:
        reply = await server.chat("Add the numbers 3 and 4.", tools=[ADD], tool_choice="required")
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "add_numbers")
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}


async def test_a_tools_result_is_read() -> None:
    """A conversation goes on behind a call: its message without content and the tool's result are taken."""
    call = {"id": "c1", "type": "function", "function": {"name": "add_numbers", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    async with serving() as server:
        reply = await server.chat(messages=messages, tools=[ADD])
    assert reply.json["choices"][0]["message"]["content"] == "The tool said: 7"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_both_names_of_the_limit_are_obeyed(name: str, stream: bool) -> None:
    """`max_tokens` and `max_completion_tokens` cut the answer, and it says that it was cut."""
    async with serving() as server:
        reply = await server.chat(stream=stream, **{name: 2})
    if stream:
        assert reply.text == "You said"
        assert reply.chunks[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert reply.json["choices"][0]["message"]["content"] == "You said"
        assert reply.json["choices"][0]["finish_reason"] == "length"


async def test_the_newer_limit_wins() -> None:
    """Where both limits are given, `max_completion_tokens` counts."""
    async with serving() as server:
        reply = await server.chat(max_tokens=4, max_completion_tokens=1)
    assert reply.json["choices"][0]["message"]["content"] == "You"


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_instructions_come_under_both_roles(role: str) -> None:
    """A message of the developer is as good as one of the system."""
    messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    async with serving() as server:
        reply = await server.chat(messages=messages)
    assert reply.json["choices"][0]["message"]["content"] == "You said: Hi"


@pytest.mark.parametrize("content", ["Hi there", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]])
async def test_content_is_text_or_parts(content: Any) -> None:
    """A message's content may be a text or a list of parts."""
    async with serving() as server:
        reply = await server.chat(messages=[{"role": "user", "content": content}])
    assert reply.json["choices"][0]["message"]["content"] == "You said: Hi there"


async def test_content_may_be_null() -> None:
    """A message without content is none to stumble over."""
    async with serving() as server:
        reply = await server.chat(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}])
    assert reply.status == 200


@pytest.mark.parametrize("model", ["fast", "local"])
async def test_unknown_fields_are_no_trouble(model: str) -> None:
    """A field that nobody knows is no reason to refuse, by any kind of target."""
    local = ModelConfig(target="builtin:target", speculative=SpeculativeConfig(max_total_tokens=2))
    async with serving({"fast": RULES, "local": local}) as server:
        reply = await server.chat(model=model, mystery={"a": [1]}, user="me", store=False, metadata=None)
    assert reply.status == 200


async def test_null_means_the_default() -> None:
    """Clients send null for what they leave open."""
    names = "max_tokens temperature top_p stop tools tool_choice response_format stream stream_options seed n logprobs"
    async with serving() as server:
        reply = await server.chat(**dict.fromkeys(names.split()))
    assert reply.json["choices"][0]["message"]["content"] == "You said: Good morning"


async def test_json_is_answered_with_json() -> None:
    """`response_format` reaches the model."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    async with serving() as server:
        reply = await server.chat("A dog named 'Rex'", response_format=wanted)
    assert json.loads(reply.json["choices"][0]["message"]["content"]) == {"name": "Rex"}


@pytest.mark.parametrize("content", ["one two", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]])
async def test_a_prediction_reaches_a_target_that_takes_it(content: Any) -> None:
    """A `prediction`, text or parts, is passed on where the target knows what to do with it."""
    async with ScriptedModelServer("one two three") as upstream:
        model = ModelConfig(target=f"mistral:tiny@{upstream.url}")
        async with serving(model) as server:
            reply = await server.chat(prediction={"type": "content", "content": content})
        assert upstream.requests[-1]["prediction"] == {"type": "content", "content": "one two"}
    assert reply.json["choices"][0]["message"]["content"] == "one two three"


async def test_a_prediction_is_no_trouble_to_other_targets() -> None:
    """A target that takes no predictions answers as if there were none."""
    async with serving() as server:
        reply = await server.chat(prediction={"type": "content", "content": "You said: nothing"})
    assert reply.json["choices"][0]["message"]["content"] == "You said: Good morning"


async def test_what_became_of_drafted_tokens_is_in_the_usage() -> None:
    """Confirmed and rejected drafted tokens are reported where OpenAI reports predictions, streamed or not."""
    async with serving(PAIR) as server:
        whole = await server.chat("def test_spawnl(self):")
        streamed = await server.chat("def test_spawnl(self):", stream=True, stream_options=USAGE)
    for usage in (whole.json["usage"], streamed.chunks[-1]["usage"]):
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        assert details["rejected_prediction_tokens"] >= 0
        assert usage["completion_tokens"] == 24


async def test_what_a_remote_target_knows_is_passed_on_untouched() -> None:
    """Fields that this server does not read, and its operator passes on, go to a remote target as they are."""
    odd = {"service_tier": "flex", "mystery": {"deep": [1, None, "x"]}, "parallel_tool_calls": False}
    passing = ("service_tier", "mystery")
    async with ScriptedModelServer("Fine.") as upstream, serving(remote(upstream.url, extra_fields=passing)) as server:
        assert (await server.chat(**odd)).status == 200
        assert upstream.requests[-1].items() >= odd.items()


@pytest.mark.parametrize("fields", [{"n": 2}, {"audio": {"voice": "x"}}, {"functions": [ADD]}])
async def test_what_a_local_target_cannot_serve_is_refused(fields: dict[str, Any]) -> None:
    """A field that would change the answer and that a model in this process has not is refused by its name."""
    async with serving(ModelConfig(target="builtin:target")) as server:
        reply = await server.chat(max_tokens=2, **fields)
    assert reply.status == 400
    assert next(iter(fields)) in reply.error["message"]
    assert reply.error["param"] == next(iter(fields))


# ---------------------------------------------------------------------------------------------- the trace


async def traced(model: ModelConfig, text: str = "Good morning", **fields: Any) -> list[Any]:
    async with serving(model) as server:
        reply = await server.post(PATH, ask(PATH, text, stream=True, **fields), x_llm_spec_trace="1")
    assert reply.status == 200, reply.data
    return reply.chunks


async def test_a_trace_tells_how_each_piece_came_about() -> None:
    """With the header every chunk has `llm_spec`: how it began, where each piece is from, rounds, the result."""
    chunks = await traced(PAIR, "def test_spawnl(self):")
    told = [chunk["llm_spec"] for chunk in chunks if "llm_spec" in chunk]
    assert told[0]["started"].keys() == {"strategy", "guarantee", "target", "draft"}
    pieces = [chunk["llm_spec"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("content")]
    assert {piece["origin"] for piece in pieces} <= {"plain", "accepted", "correction", "bonus"}
    assert "accepted" in {piece["origin"] for piece in pieces}
    times = [piece["t"] for piece in pieces]
    assert times == sorted(times)
    assert all(0 <= at < 60 for at in times)
    rounds = [one["round"] for one in told if "round" in one]
    assert rounds
    assert sum(one["num_accepted_tokens"] for one in rounds) > 0
    assert "result" in told[-1]
    assert told[-1]["result"]["strategy"] == "tokens"


async def test_a_trace_does_not_change_the_text() -> None:
    """The text is the same with and without the trace, and so is its end."""
    async with serving() as server:
        plain = await server.chat(stream=True)
        reply = await server.post(PATH, ask(PATH, stream=True), x_llm_spec_trace="1")
    assert reply.text == plain.text
    assert reply.data.endswith(b"data: [DONE]\n\n")
    assert [c["finish_reason"] for chunk in reply.chunks for c in chunk["choices"]][-1] == "stop"


async def test_no_trace_unless_it_is_asked_for() -> None:
    """Clients that do not know of it see nothing but OpenAI's own fields."""
    async with serving() as server:
        for header in ("0", ""):
            reply = await server.post(PATH, ask(PATH, stream=True), x_llm_spec_trace=header)
            assert b"llm_spec" not in reply.data


async def test_a_trace_tells_of_retries() -> None:
    """A second call of the target is reported as `retry`, with the wait."""
    faults = ServerFaults(num_requests=1, status=503)
    async with ScriptedModelServer("Fine, thank you.", faults=faults) as upstream:
        chunks = await traced(remote(upstream.url))
    (retry,) = [chunk["llm_spec"]["retry"] for chunk in chunks if "retry" in chunk.get("llm_spec", ())]
    assert retry.keys() >= {"reason", "wait_s", "is_continued", "t"}
    assert upstream.url.split("/")[2] not in json.dumps(chunks)


async def test_a_trace_tells_of_a_draft_that_was_given_up() -> None:
    """A draft that fails is reported as `fallback`, without its address, and the answer is whole all the same."""
    async with ScriptedModelServer("one two three four") as upstream, ScriptedModelServer("x") as draft:
        draft.faults = ServerFaults(status=500)
        speculative = SpeculativeConfig(strategy="probe")
        model = remote(upstream.url, draft=f"vllm:tiny@{draft.url}", speculative=speculative)
        await discover_features(model)
        chunks = await traced(model)
        address = draft.url.split("/")[2]
    assert [chunk["llm_spec"]["fallback"] for chunk in chunks if "fallback" in chunk.get("llm_spec", ())]
    assert address not in json.dumps(chunks)
    deltas = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(deltas) == "one two three four"


async def test_a_trace_tells_of_racing_streams() -> None:
    """Streams of a race are reported as `upstream`, each with what became of it."""
    text = " ".join(f"word{i}" for i in range(60))
    async with ScriptedModelServer(text, continues_prefix="fields") as upstream:
        model = remote(upstream.url, draft="lookup", speculative=SpeculativeConfig(strategy="race"))
        await discover_features(model)
        chunks = await traced(model, text)
    upstreams = [chunk["llm_spec"]["upstream"] for chunk in chunks if "upstream" in chunk.get("llm_spec", ())]
    assert upstreams
    assert {one["outcome"] for one in upstreams} <= {"emitted", "cancelled"}
