"""Files in pydantic-ai's prompts and tools' results: downloads, uploads, marks of caches, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("pydantic_ai")

from aiohttp import web
from pydantic_ai import Agent, AudioUrl, BinaryContent, CachePoint, DocumentUrl, ImageUrl, UserError, VideoUrl
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.messages import UploadedFile
from pydantic_ai.native_tools import CodeExecutionTool, WebSearchTool

from llm_spec import ChatRequest, Finish, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider

MEDIA = {"a.png": "image/png", "a.txt": "text/plain", "a.json": "application/json", "a.pdf": "application/pdf"}
MEDIA |= {"a.wav": "audio/wav", "a.mp3": "audio/mpeg"}
LOCAL: Any = "allow-local"


@pytest_asyncio.fixture(name="root")
async def serve_files() -> AsyncGenerator[str]:
    """Files that all hold `data`, where pydantic-ai loads them only by leave."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"data", headers={"Content-Type": MEDIA[request.match_info["name"]]})

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def send(item: Any, name: str = "generic:m") -> Any:
    """The part that the item becomes."""
    provider = ScriptedProvider("Hi")
    provider.name = name
    await Agent(SpeculativeModel(provider)).run(["look", item])
    content = provider.requests[0].messages[-1].content
    assert content is not None
    return content[1]


async def test_an_image_is_downloaded_where_that_is_requested(root: str) -> None:
    """Else its address is sent."""
    url = f"{root}/a.png"
    detail: Any = {"detail": "low"}
    downloaded = await send(ImageUrl(url, force_download=LOCAL, vendor_metadata=detail))
    assert downloaded == {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZGF0YQ==", "detail": "low"}}
    assert await send(ImageUrl(url)) == {"type": "image_url", "image_url": {"url": url}}


async def test_a_private_address_needs_leave(root: str) -> None:
    """A model that writes addresses cannot make the program load them."""
    with pytest.raises(ValueError, match="private"):
        await send(ImageUrl(f"{root}/a.png", force_download=True))


@pytest.mark.parametrize("name", ["a.txt", "a.json"])
async def test_a_text_by_address_is_read_into_the_prompt(root: str, name: str) -> None:
    part = await send(DocumentUrl(f"{root}/{name}", force_download=LOCAL))
    assert part["type"] == "text"
    assert "\ndata\n" in part["text"]
    assert MEDIA[name] in part["text"]


async def test_other_files_by_address_are_sent_by_content(root: str) -> None:
    document = await send(DocumentUrl(f"{root}/a.pdf", force_download=LOCAL))
    data = "data:application/pdf;base64,ZGF0YQ=="
    assert document == {"type": "file", "file": {"file_data": data, "filename": "filename.pdf"}}
    for kind in ("wav", "mp3"):
        sound = await send(AudioUrl(f"{root}/a.{kind}", force_download=LOCAL))
        assert sound == {"type": "input_audio", "input_audio": {"data": "ZGF0YQ==", "format": kind}}


async def test_an_uploaded_document_goes_to_its_own_provider() -> None:
    """By its id."""
    file = UploadedFile("file-1", provider_name="openai", media_type="application/pdf")
    assert await send(file, "openai:gpt-5") == {"type": "file", "file": {"file_id": "file-1"}}


@pytest.mark.parametrize("name", ["anthropic:m", "openrouter:m", "generic:m"])
async def test_a_cache_point_marks_what_is_before_it(name: str) -> None:
    """Where caches are marked in messages; elsewhere it says nothing."""
    provider = ScriptedProvider("Hi")
    provider.name = name
    prompt = [
        CachePoint(),
        "long",
        CachePoint(),
        BinaryContent(b"dot", media_type="image/png"),
        CachePoint(ttl="1h"),
        "?",
    ]
    await Agent(SpeculativeModel(provider)).run(prompt)
    content: Any = provider.requests[0].messages[0].content
    marks = [part.get("cache_control") for part in content]
    expected = [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None]
    assert marks == ([None] * 3 if name == "generic:m" else expected)


REFUSED: list[tuple[Any, str]] = [
    (VideoUrl("https://example.com/a.mp4"), "VideoUrl"),
    (BinaryContent(b"x", media_type="video/mp4"), "video/mp4"),
    (BinaryContent(b"x", media_type="audio/ogg"), "oga"),
    (BinaryContent(b"\xff", media_type="text/plain"), "UTF-8"),
    (UploadedFile("f", provider_name="openai", media_type="application/pdf"), "openai"),
    (UploadedFile("f", provider_name="anthropic", media_type="application/pdf"), "anthropic"),
]


@pytest.mark.parametrize(("item", "words"), REFUSED)
async def test_what_has_no_place_in_a_chat_is_refused(item: Any, words: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UserError, match=words):
        await send(item)


async def test_an_uploaded_image_cannot_be_named() -> None:
    """Chat completions have an id for documents alone."""
    with pytest.raises(UserError, match="image/png"):
        await send(UploadedFile("f", provider_name="openai", media_type="image/png"), "openai:gpt-5")


CANNOT_READ = [("video/mp4", "video")]


@pytest.mark.parametrize(("media_type", "kind"), CANNOT_READ)
async def test_a_file_of_a_tool_that_cannot_be_sent_is_named(media_type: str, kind: str) -> None:
    """The model is told; the run goes on."""

    def script(request: ChatRequest) -> list[StreamEvent]:
        is_first = not any(message.role == "tool" for message in request.messages)
        call = [ToolCallDelta(0, "c1", "read", "{}"), Finish("tool_calls")]
        return call if is_first else [TextDelta("done"), Finish("stop")]

    provider = ScriptedProvider(script)
    agent = Agent(SpeculativeModel(provider))

    @agent.tool_plain
    def read() -> BinaryContent:
        return BinaryContent(b"x", media_type=media_type)

    assert (await agent.run("hi")).output == "done"
    told = [message.text for message in provider.requests[1].messages if message.role == "tool"]
    assert f"cannot read {kind}" in told[0]


async def test_a_model_in_this_process_reads_texts_alone() -> None:
    """Its profile says so, and a tool's other files are named to it."""
    async with SpeculativeModel("builtin:target") as model:
        profile = model.profile
    assert not profile.get("supports_image_input")
    assert not profile.get("supports_audio_file_input")
    assert "text/plain" in profile.get("supported_document_media_types", ())
    assert "application/pdf" not in profile.get("supported_document_media_types", ())


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tool", [WebSearchTool(), CodeExecutionTool()], ids=lambda tool: tool.kind)
async def test_a_vendors_own_tools_are_refused(tool: Any, is_streamed: bool) -> None:
    """By name, before anything is sent; an optional one is left out by pydantic-ai."""
    provider = ScriptedProvider("Hi")
    agent = Agent(SpeculativeModel(provider), capabilities=[NativeTool(tool)])
    run = agent.run_stream("hi").__aenter__() if is_streamed else agent.run("hi")
    with pytest.raises(UserError, match=type(tool).__name__):
        await run
    assert not provider.requests


def test_no_sdk_of_a_vendor_is_needed() -> None:
    """Neither to import the adapter nor for strict schemas."""
    program = """
import sys
sys.modules |= dict.fromkeys(["openai", "anthropic"])
import asyncio
from pydantic_ai import Agent, Tool
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.testing import ScriptedProvider
def measure(length: int, unit: str = "m") -> str: return unit
provider = ScriptedProvider("Hi")
asyncio.run(Agent(SpeculativeModel(provider), tools=[Tool(measure, strict=True)]).run("hi"))
print(provider.requests[0].tools[0]["function"]["parameters"]["required"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("['length', 'unit']\n", "")
