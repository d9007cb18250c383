"""The id that a server gave its answer is kept, whole and streamed, through a decoder, whatever API it is of."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import answer_frames, serve
from support.wire import Wire, chunk, served

from llm_spec import ChatRequest, Finish, SpeculativeDecoder, open_provider

REQUEST: Final = ChatRequest.create("Hi")
CHOICE: Final = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vendors' providers need some."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "k")


async def list_ids(spec: str) -> list[str | None]:
    """Those of a whole answer, a streamed one, a result and a decoder's stream."""
    provider: Any = open_provider(spec)
    ids = [(await provider.complete(REQUEST)).response_id]
    async with provider.stream(REQUEST) as events:
        ids += [event.response_id async for event in events if isinstance(event, Finish)]
    await provider.aclose()
    async with SpeculativeDecoder(target=spec, draft=None) as decoder:
        ids.append((await decoder.decode(REQUEST)).response_id)
        async with decoder.stream(REQUEST) as events:
            ids += [event.response_id async for event in events if isinstance(event, Finish)]
    return ids


@pytest.mark.parametrize("kind", ["generic", "openai", "vllm"])
@pytest.mark.parametrize(
    ("said", "kept"), [("chatcmpl-7", "chatcmpl-7"), ("", None), (None, None), (7, None), ("\ud800", None)]
)
async def test_of_chat_completions(kind: str, said: Any, kept: str | None) -> None:
    """What is no text, or cannot be written, is none."""
    wire = Wire()
    wire.frames = [chunk({"content": "ok"}, id=said), chunk({}, "stop", id=said), b"data: [DONE]\n\n"]
    wire.whole = {"id": said, "choices": [CHOICE]}
    async with served("/chat/completions", wire.answer) as url:
        assert await list_ids(f"{kind}:gpt-4.1@{url}") == [kept] * 4


async def test_of_messages() -> None:
    """The message's."""
    async with serve() as wire:
        wire.frames = answer_frames("ok")
        assert await list_ids(f"anthropic:claude-sonnet-4-5@{wire.url}") == ["msg_1"] * 4


def test_an_id_is_no_difference() -> None:
    """Two answers that say the same are equal."""
    assert Finish("stop", response_id="a") == Finish("stop", response_id="b")
