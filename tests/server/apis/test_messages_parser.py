"""What Claude Code and others say in Anthropic's words, as targets of another API are told it."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import answer_frames, serve
from support.serving import ask, serving
from support.wire import Wire, served, text_chunks

from llm_spec import InvalidRequestError
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import ModelConfig
from llm_spec.server.apis.messages_parser import parse_messages_request

PATH: Final = "/v1/messages"
DATA: Final = "aGVsbG8="
PNG: Final[dict[str, Any]] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PNG_PART: Final = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
CALL: Final[dict[str, Any]] = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
CHAT_CALL: Final = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SPOKEN: Final = {"type": "text", "text": "let me see"}


def thinking(text: Any, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def text_document(text: str, **fields: Any) -> dict[str, Any]:
    return document({"type": "text", "media_type": "text/plain", "data": text}, **fields)


def read(*messages: dict[str, Any], target_api: Any = "chat", **fields: Any) -> list[dict[str, Any]]:
    """The messages that a chat target is sent."""
    parsed = parse_messages_request(ask(PATH, messages=list(messages), **fields), target_api=target_api)
    return [message.to_openai() for message in parsed.request.messages]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


@pytest.mark.parametrize("target_api", ["chat", None])
@pytest.mark.parametrize(
    ("blocks", "sent"),
    [
        ([thinking("hmm"), SPOKEN], {"content": "let me see", "reasoning_content": "hmm"}),
        ([thinking("hmm", "SIG=="), CALL], {"content": None, "tool_calls": [CHAT_CALL], "reasoning_content": "hmm"}),
        (
            [thinking("one"), SPOKEN, thinking(" two", "S"), CALL],
            {"content": "let me see", "tool_calls": [CHAT_CALL], "reasoning_content": "one two"},
        ),
        ([thinking(""), CALL], {"content": None, "tool_calls": [CHAT_CALL]}),
        ([thinking(None), SPOKEN], {"content": "let me see"}),
        ([{"type": "redacted_thinking", "data": "x"}, SPOKEN], {"content": "let me see"}),
        ([{"type": "thinking"}, SPOKEN], {"content": "let me see"}),
    ],
)
def test_reasoning_of_earlier_turns_goes_back(
    blocks: list[dict[str, Any]], sent: dict[str, Any], target_api: str | None
) -> None:
    """With signatures of whoever wrote it, or without; what is empty or may not be read says nothing."""
    messages = read({"role": "user", "content": "q"}, assistant(*blocks), user(SPOKEN), target_api=target_api)
    assert messages[1] == {"role": "assistant", **sent}


def test_answers_that_follow_each_other_are_one() -> None:
    """As in Anthropic's API: chat servers and templates take one turn of the assistant at a time."""
    answers = [assistant(thinking("a"), SPOKEN), assistant(thinking("b")), assistant(CALL)]
    messages = read({"role": "user", "content": "q"}, *answers, user(result("1")))
    assert messages[1] == {
        "role": "assistant",
        "content": "let me see",
        "tool_calls": [CHAT_CALL],
        "reasoning_content": "ab",
    }
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]


DOCUMENTS: Final[list[tuple[dict[str, Any], Any]]] = [
    (text_document("hello"), "<document>\nhello\n</document>\n"),
    (text_document("hello", title='a "b".txt'), '<document title="a \\"b\\".txt">\nhello\n</document>\n'),
    (
        document({"type": "content", "content": "hello"}, title="t", context="c"),
        '<document title="t" context="c">\nhello\n</document>\n',
    ),
    (
        document({"type": "content", "content": [SPOKEN, PNG]}),
        (
            {"type": "text", "text": "<document>\n"},
            SPOKEN,
            PNG_PART,
            {"type": "text", "text": "\n</document>\n"},
        ),
    ),
    (
        document({"type": "base64", "media_type": "application/pdf", "data": "A" * 400}, title="a.pdf"),
        '<document title="a.pdf">\n[application/pdf, 300 bytes, which this model was not shown]\n</document>\n',
    ),
    (
        document({"type": "url", "url": "https://a.b/c.pdf"}),
        "<document>\n[https://a.b/c.pdf, which this model was not shown]\n</document>\n",
    ),
    (
        {"type": "search_result", "source": "https://a.b", "title": "t", "content": [SPOKEN, SPOKEN]},
        '<search_result title="t" source="https://a.b">\nlet me see\nlet me see\n</search_result>\n',
    ),
    ({"type": "tool_reference", "tool_name": "f"}, "Tool: f\n"),
    (SPOKEN, "let me see"),
    (PNG, (PNG_PART,)),
    (
        {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}},
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},),
    ),
]


@pytest.mark.parametrize("place", ["user", "tool"])
@pytest.mark.parametrize(("block", "content"), DOCUMENTS)
def test_every_block_reaches_a_chat_target(block: dict[str, Any], content: Any, place: str) -> None:
    """As a part where there is one, else as text, in messages of the user and in results of tools."""
    before = [{"role": "user", "content": "q"}, assistant(CALL)]
    (message,) = (
        read(user(block))
        if place == "user"
        else [m for m in read(*before, user(result([block]))) if m["role"] == "tool"]
    )
    assert message["content"] == (list(content) if isinstance(content, tuple) else content)


@pytest.mark.parametrize(
    ("block", "sent"),
    [
        (result("broken", is_error=True), "Error: broken"),
        (result([SPOKEN], is_error=True), "Error: let me see"),
        (result(None, is_error=True), "Error: "),
        (result([PNG], is_error=True), [{"type": "text", "text": "Error: "}, PNG_PART]),
        (result("fine", is_error=False), "fine"),
        (result(None), ""),
        (result([]), ""),
        ({"type": "tool_result", "tool_use_id": "t1"}, ""),
        (result([SPOKEN, PNG]), [SPOKEN, PNG_PART]),
    ],
)
def test_results_of_tools(block: dict[str, Any], sent: Any) -> None:
    """A failure is said in the text: chat completions have no other place for it."""
    messages = read({"role": "user", "content": "q"}, assistant(CALL), user(block))
    assert messages[2] == {"role": "tool", "content": sent, "tool_call_id": "t1"}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "container_upload", "file_id": "f"}, "'container_upload'"),
        (document({"type": "file", "file_id": "f"}), "source is of type 'file'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source is of type 'file'"),
        (result({"text": "x"}), "content is of type dict"),
        (result([{"type": "mystery"}]), "'mystery'"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(block: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content is wrong: .*" + words):
        read(user(block))


@pytest.mark.parametrize(
    "block", [{"type": "container_upload", "file_id": "f"}, {"type": "image", "source": {"type": "file"}}]
)
def test_a_target_of_that_api_is_sent_any_block(block: dict[str, Any]) -> None:
    """What this server does not know, the target may."""
    request = parse_messages_request(ask(PATH, messages=[user(SPOKEN, block)]), target_api="messages").request
    (message,) = request.messages
    assert message.native is not None
    assert message.native.value["content"] == [SPOKEN, block]


HEAD: Final = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
TOLD: Final = "You are a coding agent."


def billed(form: str, nonce: str) -> Any:
    head = HEAD.format(nonce)
    blocks = {
        "blocks": [head, TOLD],
        "text": f"{head}\n{TOLD}",
        "one block": [f"{head}\n\n{TOLD}"],
        "head alone": [head],
        "first alone counts": [TOLD, head],
    }[form]
    return blocks if isinstance(blocks, str) else [{"type": "text", "text": text} for text in blocks]


FORMS: Final = [("blocks", TOLD), ("text", TOLD), ("one block", TOLD), ("head alone", None)]


@pytest.mark.parametrize("target_api", ["chat", None])
@pytest.mark.parametrize(("form", "told"), FORMS)
def test_who_pays_is_not_told_to_other_targets(form: str, told: str | None, target_api: str | None) -> None:
    """It changes with each request: no two prompts would begin alike."""
    messages = read({"role": "user", "content": "q"}, system=billed(form, "fa690"), target_api=target_api)
    assert [m["content"] for m in messages if m["role"] == "system"] == ([] if told is None else [told])


@pytest.mark.parametrize(
    "system", [billed("first alone counts", "1"), f"{TOLD}\n{HEAD}", "X-Anthropic-Billing-Header: x", " " + HEAD]
)
def test_other_texts_of_the_system_stay_as_they_are(system: Any) -> None:
    """Only the line that is known is left out, and only at the beginning."""
    sent = read({"role": "user", "content": "q"}, system=system)[0]["content"]
    assert sent == (system if isinstance(system, str) else "\n\n".join(block["text"] for block in system))


@pytest.mark.parametrize("target", ["chat", "messages"])
@pytest.mark.parametrize("form", ["blocks", "text", "one block"])
async def test_a_conversation_keeps_its_id(form: str, target: str) -> None:
    """Also where the line is sent on, to Anthropic's own server."""
    chat = Wire()
    chat.frames = text_chunks("ok")
    async with serve() as messages, served("/chat/completions", chat.answer) as url:
        messages.frames = answer_frames("ok")
        wire = chat if target == "chat" else messages
        model = f"generic:m@{url}" if target == "chat" else "claude:claude-sonnet-4-5"
        claude = NamedProvider(type="anthropic", base_url=messages.url, api_key="sk-ant-any")
        config = ModelConfig(target=model)
        config = ModelConfig(
            target=model, speculative=type(config.speculative)(session_header="x-session-id", stream_always=False)
        )
        async with serving(config, providers={"claude": claude}) as server:
            for nonce in ("fa690", "1c8b4"):
                assert (await server.post(PATH, ask(PATH, system=billed(form, nonce)))).status == 200
        first, second = (headers["x-session-id"] for headers in wire.headers)
        assert first == second
        if target == "messages":
            assert [body["system"] for body in wire.bodies] == [billed(form, nonce) for nonce in ("fa690", "1c8b4")]


async def test_a_document_that_is_only_named_is_told_to_the_client() -> None:
    """In the header that says what was changed."""
    pdf = document({"type": "base64", "media_type": "application/pdf", "data": DATA})
    wire = Wire()
    wire.frames = text_chunks("ok")
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"generic:m@{url}")) as server,
    ):
        for content, told in (([pdf], "documents"), ([result([pdf])], "documents"), ([text_document("x")], None)):
            history = [{"role": "user", "content": "q"}, assistant(CALL), {"role": "user", "content": content}]
            reply = await server.post(PATH, ask(PATH, messages=history))
            assert reply.status == 200
            assert reply.headers.get("x-llm-spec-changed") == told
