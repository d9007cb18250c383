"""Whatever a body holds, the answer is the API's own: never a 5xx, always an error object where it is refused."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.serving import ENDPOINTS, Post, ask, check_error

FEW: Final = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MODELS: Final = ("fast", "local")

# every field that an endpoint reads, so that wrong values meet the code that reads them
FIELDS: Final = {
    "/v1/chat/completions": [
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "prediction",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "logprobs",
        "top_logprobs",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "functions",
        "user",
        "metadata",
        "audio",
    ],
    "/v1/completions": [
        "prompt",
        "model",
        "max_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "echo",
        "logprobs",
        "seed",
        "suffix",
        "best_of",
    ],
    "/v1/responses": [
        "input",
        "model",
        "instructions",
        "max_output_tokens",
        "metadata",
        "reasoning",
        "stream",
        "text",
        "tool_choice",
        "tools",
        "previous_response_id",
        "parallel_tool_calls",
        "include",
        "truncation",
        "temperature",
        "store",
    ],
    "/v1/messages": [
        "messages",
        "model",
        "max_tokens",
        "system",
        "stop_sequences",
        "stream",
        "tool_choice",
        "tools",
        "metadata",
        "output_config",
        "top_k",
        "thinking",
    ],
}
WORDS: Final = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "id",
    "user",
    "assistant",
    "tool",
    "system",
    "developer",
    "function",
    "arguments",
    "parameters",
    "input_text",
    "properties",
    "object",
    "$ref",
    "anyOf",
    "items",
    "enum",
    "tool_calls",
    "tool_use",
    "tool_result",
    "tool_use_id",
    "image",
    "source",
    "base64",
    "url",
    "json_schema",
    "json_object",
    "schema",
    "required",
    "auto",
    "any",
    "none",
    "call_id",
    "output",
    "input_image",
    "image_url",
    "include_usage",
    "effort",
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 10**400, 0, -1]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(alphabet=st.characters(), max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system", "developer"]) | values,
            "content": values,
            "tool_calls": values,
            "tool_call_id": values,
            "name": values,
            "type": values,
        },
    ),
    min_size=1,
    max_size=3,
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A body that would be answered, with up to three of its fields made wrong."""
    wrong = st.dictionaries(st.sampled_from(FIELDS[path]), values, min_size=1, max_size=3)
    several = st.sampled_from([name for name in ("messages", "input", "tools") if name in FIELDS[path]] or ["prompt"])
    said = st.dictionaries(several, messages, max_size=1)
    return st.builds(
        lambda model, told, fields: {**ask(path, "Hi"), **told, **fields, "model": model},
        st.sampled_from(MODELS),
        said,
        wrong,
    )


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_body_is_too_wrong_for_an_answer(path: str, post: Post) -> None:
    """Fields of any type and shape get an answer or an error object, never a 5xx."""

    @FEW
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        reply = post(path, json.dumps(body).encode())
        assert reply.status < 500, (body, reply.data)
        if reply.status != 200:
            check_error(path, reply)
        elif reply.headers["Content-Type"].startswith("text/event-stream"):
            assert reply.frames, body

    check()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_bytes_are_too_wrong_for_an_answer(path: str, post: Post) -> None:
    """A body that is not a JSON object is refused with 400, in the API's own form."""

    @FEW
    @example(b"")
    @example(b"\xff\xfe{")
    @example(b"[]")
    @example(b"null")
    @example(b'{"model": "fast"')
    @given(st.binary(max_size=40) | values.filter(lambda value: not isinstance(value, dict)).map(_encoded))
    def check(data: bytes) -> None:
        reply = post(path, data)
        assert reply.status == 400, reply.data
        check_error(path, reply)

    check()


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("depth", [500, 900, 950, 975, 985, 995, 5000, 200_000])
def test_deep_nesting_is_no_trouble(path: str, depth: int, post: Post) -> None:
    """However deep a body is nested, it is read or refused."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    for name in ("metadata", "tools", "response_format", "text", "unknown", "messages", "input", "prompt"):
        listed = b"[" + deep + b"]" if name in ("tools", "messages", "input") else deep
        body = (
            json.dumps(ask(path) | {name: 0}).encode().replace(f'"{name}": 0'.encode(), f'"{name}":'.encode() + listed)
        )
        reply = post(path, body)
        assert reply.status in (200, 400), (name, reply.data[:300])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_is_refused(path: str, model: str, stream: bool, post: Post) -> None:
    """A lone surrogate is no text: 400, before any model sees it."""
    reply = post(path, json.dumps(ask(path, "a\ud800b", model=model, stream=stream)).encode())
    assert reply.status == 400, reply.data
    check_error(path, reply)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" + "0" * 5000])
def test_what_is_no_number_in_json_is_refused(path: str, number: str, post: Post) -> None:
    """NaN and Infinity are not JSON, nor could they be passed on; a number of thousands of digits is refused, too."""
    body = json.dumps(ask(path, other=0)).replace('"other": 0', f'"other": {number}')
    reply = post(path, body.encode())
    assert reply.status == 400, reply.data
    check_error(path, reply)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "temperature"),
        ("/v1/chat/completions", "min_p"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
@pytest.mark.parametrize(("number", "statuses"), [("1" + "0" * 400, (200, 400)), ("-1", (400,)), ("1e999", (400,))])
def test_a_number_out_of_range_is_no_trouble(
    path: str, name: str, number: str, statuses: tuple[int, ...], post: Post
) -> None:
    """A number that no server could mean is refused, unless it is a limit that cannot be reached."""
    body = json.dumps(ask(path) | {name: 0}).replace(f'"{name}": 0', f'"{name}": {number}')
    reply = post(path, body.encode())
    assert reply.status in statuses, reply.data
    if reply.status != 200:
        check_error(path, reply)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [3]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"max_tokens": "3"}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": True}, "max_tokens"),
        ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"stream": "yes"}, "stream"),
        ("/v1/chat/completions", {"stop": 3}, "stop"),
        ("/v1/chat/completions", {"stop": [3]}, None),
        ("/v1/chat/completions", {"n": 0}, "n"),
        ("/v1/chat/completions", {"tools": {}}, "tools"),
        ("/v1/chat/completions", {"tools": [{}], "tool_choice": 3}, "tool_choice"),
        ("/v1/chat/completions", {"response_format": "json"}, "response_format"),
        ("/v1/chat/completions", {"logit_bias": [1]}, "logit_bias"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"type": "mystery"}]}, "input[0]"),
        ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0]"),
    ],
)
def test_an_error_names_its_field(path: str, fields: dict[str, Any], param: str | None, post: Post) -> None:
    """What is wrong is refused with 400, and `param` says where."""
    reply = post(path, json.dumps(ask(path) | fields).encode())
    assert reply.status == 400, reply.data
    check_error(path, reply)
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "king", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "a"}], "tool_choice": {"type": "mystery"}},
        {"system": 3},
    ],
)
def test_a_wrong_message_is_refused_in_the_words_of_that_api(fields: dict[str, Any], post: Post) -> None:
    """The messages API's errors have its own form, and its own names."""
    reply = post("/v1/messages", json.dumps(ask("/v1/messages") | fields).encode())
    assert reply.status == 400, reply.data
    check_error("/v1/messages", reply)
    assert reply.error["type"] == "invalid_request_error"
