"""Images in results of tools reach a target that sees them, and are named for one that does not."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.serving import ask, remote, serving

from llm_spec import ChatMessage, SpeculativeConfig, ToolCall
from llm_spec.contract.errors import ConfigError
from llm_spec.contract.messages import NativeMessage
from llm_spec.server import ModelConfig
from llm_spec.server.apis.tool_images import place_tool_images
from llm_spec.server.config import load_config
from llm_spec.testing.server import ScriptedModelServer

PNG: Final = "data:image/png;base64," + "A" * 16_000
SHOT: Final = {"type": "image_url", "image_url": {"url": PNG}}
PDF: Final = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,QUJD"}}
CALLS: Final = ChatMessage("assistant", None, tool_calls=(ToolCall("c0", "f", "{}"), ToolCall("c1", "f", "{}")))
ASKED: Final = ChatMessage("user", "hi")


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(number: int, *parts: Any) -> ChatMessage:
    return ChatMessage("tool", parts, tool_call_id=f"c{number}")


def show(messages: tuple[ChatMessage, ...]) -> list[Any]:
    """Roles with texts; an image or file as its own data."""
    return [(message.role, _show_content(message.content)) for message in messages]


def _show_content(content: Any) -> Any:
    if not isinstance(content, tuple):
        return content
    return [part["text"] if part["type"] == "text" else part for part in content]


THERE: Final = "in the message after the results of tools"
NOT_SHOWN: Final = "not shown, as this model takes text alone"
SEEN: Final[dict[str, tuple[tuple[ChatMessage, ...], list[Any]]]] = {
    "an image behind a text": (
        (CALLS, result(0, text("shot"), SHOT)),
        [("tool", f"shot\n[image 1: {THERE}]"), ("user", ["[image 1, of tool call c0]", SHOT])],
    ),
    "an image alone": (
        (CALLS, result(0, SHOT)),
        [("tool", f"[image 1: {THERE}]"), ("user", ["[image 1, of tool call c0]", SHOT])],
    ),
    "images of several calls stand behind the last result": (
        (CALLS, result(0, SHOT), result(1, text("a"), PDF, text("b"), text("c"))),
        [
            ("tool", f"[image 1: {THERE}]"),
            ("tool", f"a\n[file 2: {THERE}]\nbc"),
            ("user", ["[image 1, of tool call c0]", SHOT, "[file 2, of tool call c1]", PDF]),
        ],
    ),
    "each turn has its own message": (
        (CALLS, result(0, SHOT), CALLS, result(0, SHOT), ChatMessage("user", "and?")),
        [
            ("tool", f"[image 1: {THERE}]"),
            ("user", ["[image 1, of tool call c0]", SHOT]),
            ("assistant", None),
            ("tool", f"[image 1: {THERE}]"),
            ("user", ["[image 1, of tool call c0]", SHOT]),
            ("user", "and?"),
        ],
    ),
    "a system text between results": (
        (CALLS, result(0, SHOT), ChatMessage("developer", "note"), ChatMessage("tool", "x", tool_call_id="c1")),
        [
            ("tool", f"[image 1: {THERE}]"),
            ("developer", "note"),
            ("tool", "x"),
            ("user", ["[image 1, of tool call c0]", SHOT]),
        ],
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_tools_show_follows_the_results_of_its_turn(case: str) -> None:
    messages, wanted = SEEN[case]
    assert show(place_tool_images(messages, sees_images=True))[1:] == wanted


@pytest.mark.parametrize("sees_images", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        (ASKED, CALLS, ChatMessage("tool", "text", tool_call_id="c0")),
        (ASKED, CALLS, result(0, text("text"), text("more"))),
        (ChatMessage("user", (text("text"),)),),
    ],
    ids=["texts", "text parts of a tool", "text parts of a user"],
)
def test_texts_stay_as_they_are(messages: tuple[ChatMessage, ...], *, sees_images: bool) -> None:
    """The very same messages come back, so that nobody is told of a change."""
    assert place_tool_images(messages, sees_images=sees_images) is messages


def test_a_users_own_image_stays_where_it_is() -> None:
    messages = (ChatMessage("user", (text("look"), SHOT)),)
    assert place_tool_images(messages, sees_images=True) is messages


DESCRIBED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "image data": (SHOT, "image/png, 12 kB"),
    "an address": ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image https://a.example/b.png"),
    "an address as a text": ({"type": "image_url", "image_url": "https://a.example/b.png"}, "image https://a.example/b.png"),
    "a file": (PDF, "application/pdf, a.pdf, 1 kB"),
    "a file by its id": ({"type": "file", "file": {"file_id": "file-1"}}, "file file-1"),
    "sound": ({"type": "input_audio", "input_audio": {"data": "A" * 4000, "format": "wav"}}, "audio 3 kB"),
    "no fields": ({"type": "image_url"}, "image"),
    "something else": ({"type": "video"}, "file"),
}  # fmt: skip


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("case", DESCRIBED)
def test_a_target_that_takes_text_alone_is_told_what_it_is_not_shown(case: str, role: str) -> None:
    part, described = DESCRIBED[case]
    content = (text("see"), part, text("end"))
    message = result(0, *content) if role == "tool" else ChatMessage("user", content)
    (_, placed) = place_tool_images((CALLS, message), sees_images=False)
    assert placed.content == f"see\n[{described}: {NOT_SHOWN}]\nend"
    assert placed.tool_call_id == message.tool_call_id


def test_what_else_a_client_said_in_its_own_words_stays() -> None:
    """A message that is sent on as its client wrote it has no image left either."""
    native = NativeMessage("chat", {"role": "user", "content": [text("see"), SHOT], "cache_control": {"type": "x"}})
    (placed,) = place_tool_images((ChatMessage("user", (text("see"), SHOT), native=native),), sees_images=False)
    assert placed.to_openai() == {
        "role": "user",
        "content": f"see\n[image/png, 12 kB: {NOT_SHOWN}]",
        "cache_control": {"type": "x"},
    }


async def test_a_model_says_in_its_config_that_it_does_not_see() -> None:
    """The request reaches it without the image, and the answer's header says so."""
    async with (
        ScriptedModelServer("ok") as upstream,
        serving({"seeing": remote(upstream.url), "blind": remote(upstream.url, images=False)}) as server,
    ):
        said = [{"role": "user", "content": [text("look"), SHOT]}]
        path = "/v1/chat/completions"
        replies = [await server.post(path, ask(path, model=name, messages=said)) for name in ("seeing", "blind")]
    contents = [body["messages"][0]["content"] for body in upstream.requests if "messages" in body]
    assert contents == [said[0]["content"], f"look\n[image/png, 12 kB: {NOT_SHOWN}]"]
    assert [reply.headers.get("x-llm-spec-changed") for reply in replies] == [None, "images"]


async def test_a_model_in_this_process_never_sees() -> None:
    """Chat's own results of tools are placed for it, too."""
    local = ModelConfig(target="builtin:target", speculative=SpeculativeConfig(max_total_tokens=1))
    said = [
        {"role": "user", "content": [text("look"), SHOT]},
        CALLS.to_openai(),
        {"role": "tool", "tool_call_id": "c0", "content": [SHOT]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    async with serving(local) as server:
        reply = await server.post("/v1/chat/completions", ask("/v1/chat/completions", messages=said))
    assert reply.status == 200
    assert reply.headers["x-llm-spec-changed"] == "images, tool-images"


@pytest.mark.parametrize("value", ['"no"', "0"])
def test_a_config_that_says_neither_is_refused(value: str, tmp_path: Any) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[models.a]\ntarget = "rules:any"\nimages = {value}\n')
    with pytest.raises(ConfigError, match=r"line 3: models\.a\.images: images is .* must be true or false"):
        load_config(path)
    path.write_text('[models.a]\ntarget = "rules:any"\nimages = false\n')
    assert load_config(path).models["a"].images is False
