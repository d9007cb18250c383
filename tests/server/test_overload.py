"""A target that is overloaded, or finds a request too large: clients hear it in the words that they go by."""

from __future__ import annotations

from typing import Any, Final

import pytest
from support.messages_wire import begin, frame, serve, text_frames
from support.serving import ENDPOINTS, Reply, ask, serving
from support.wire import Wire, served

from llm_spec import RetryPolicy, SpeculativeConfig
from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import ModelConfig

MESSAGES: Final = "/v1/messages"
CHATS: Final = [path for path in ENDPOINTS if path != "/v1/completions"]  # which `anthropic:` targets do not answer
ONCE: Final = SpeculativeConfig(retry=RetryPolicy(max_attempts=1), stream_always=False)


def refuse(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": "no"}}


async def ask_claude(path: str, wire: Any, **fields: Any) -> Reply:
    claude = NamedProvider(type="anthropic", base_url=wire.url, api_key="sk-ant-any")
    config = ModelConfig(target="claude:claude-sonnet-4-5", speculative=ONCE)
    async with serving(config, providers={"claude": claude}) as server:
        return await server.post(path, ask(path, **fields))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [(529, "overloaded_error", 529), (413, "request_too_large", 413), (503, "overloaded_error", 503)],
)
async def test_before_the_answer_it_is_the_status(
    path: str, status: int, kind: str, told: int, *, stream: bool
) -> None:
    """Anthropic's clients know 529; to OpenAI's the same is 503."""
    async with serve() as wire:
        wire.status, wire.error, wire.error_headers = status, refuse(kind), {"Retry-After": "20"}
        reply = await ask_claude(path, wire, stream=stream)
    assert reply.status == (503 if told == 529 and path != MESSAGES else told)
    assert reply.error["type"] == kind
    assert reply.headers.get("Retry-After") == (None if status == 413 else "20")


@pytest.mark.parametrize("path", [MESSAGES, "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["overloaded_error", "request_too_large", "rate_limit_error", "api_error"])
async def test_within_a_stream_it_is_the_type(path: str, kind: str) -> None:
    """As the target said it."""
    async with serve() as wire:
        wire.frames = [*begin(), *text_frames("one "), frame("error", error=refuse(kind)["error"])]
        reply = await ask_claude(path, wire, stream=True)
    (told,) = (f.data["error"] for f in reply.frames if isinstance(f.data, dict) and "error" in f.data)
    assert (reply.status, told["type"]) == (200, kind)


@pytest.mark.parametrize("path", [MESSAGES, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("status", "told", "kind"), [(529, 529, "overloaded_error"), (413, 413, "request_too_large"), (422, 400, None)]
)
async def test_chat_servers_say_it_by_their_status(path: str, status: int, told: int, kind: str | None) -> None:
    wire = Wire()
    wire.status, wire.error = status, {"error": {"message": "no"}}
    async with (
        served("/chat/completions", wire.answer) as url,
        serving(ModelConfig(target=f"generic:m@{url}", speculative=ONCE)) as server,
    ):
        reply = await server.post(path, ask(path))
    assert reply.status == (503 if told == 529 and path != MESSAGES else told)
    assert reply.error["type"] == (kind or "invalid_request_error")
