"""Log-probabilities of models in this process, read by the official SDK: whole and streamed, drafted or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import openai
import pytest
from support.serving import HANGS_S, Asking, ask, check_error, serving_in_thread

from llm_spec import TokenLogprob, open_provider
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai
from llm_spec.server import ModelConfig
from llm_spec.server.apis.logprobs import CompletionLogprobsBuilder

TARGET: Final = open_provider("builtin:target")
MODELS: Final = ("plain", "drafted")
TEXT: Final = "import os\nimport sys\n\nclass Reader:\n    def __init__(self"
MESSAGES: Final[Any] = [{"role": "user", "content": TEXT}]
INCLUDE: Final[Any] = ["message.output_text.logprobs"]
MAX_TOKENS: Final = 24
DRAWN: Final[Any] = {"temperature": 0.7, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serves the built-in target alone and with a draft, and a scripted model that is not of this process."""
    models = {
        "plain": ModelConfig(target="builtin:target"),
        "drafted": ModelConfig(target="builtin:target", draft="lookup+builtin:draft"),
        "fast": ModelConfig(target="rules:any"),
    }
    with serving_in_thread(models) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def asking(url: str) -> AsyncGenerator[Asking]:
    """A client that sees every byte."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANGS_S)) as session:
        yield Asking(url, session)


async def told_by_provider(num_top: int, *, raw: bool = False, **sampling: Any) -> tuple[TokenLogprob, ...]:
    """Those of the target alone."""
    fields: Any = {"max_tokens": MAX_TOKENS, "top_logprobs": num_top, "raw": raw, **sampling}
    response = await TARGET.complete(ChatRequest.create(TEXT, **fields))
    assert response.logprobs is not None
    return response.logprobs


def check_told(found: object, expected: object, model: str) -> None:
    """They are the target's own; with a draft where this machine's kernels give one text."""
    own = TARGET.capabilities.token_model
    assert own is not None
    if model == "plain" or own.same_text:
        assert found == expected


def dump(entries: Sequence[Any] | None) -> list[Any]:
    return [entry.model_dump() for entry in entries or ()]


@pytest.mark.parametrize("model", MODELS)
async def test_chat_completions(client: openai.AsyncOpenAI, model: str) -> None:
    """Whole and in chunks the same entries, which are those of the target alone."""
    options: Any = {"model": model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "logprobs": True, **DRAWN}
    whole = await client.chat.completions.create(**options, top_logprobs=2)
    [choice] = whole.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    check_told(dump(entries), convert_logprobs_to_openai(await told_by_provider(2, temperature=0.7, seed=3)), model)
    assert bytes(i for entry in entries for i in entry.bytes or ()).decode() == choice.message.content

    chunks = [chunk async for chunk in await client.chat.completions.create(**options, top_logprobs=2, stream=True)]
    told: list[Any] = []
    for chunk in chunks:
        streamed = chunk.choices[0].logprobs
        pieces = dump(None if streamed is None else streamed.content)
        assert "".join(piece["token"] for piece in pieces) == (chunk.choices[0].delta.content or "")
        told += pieces
    assert told == dump(entries)

    alone = await client.chat.completions.create(**options)
    assert alone.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in alone.choices[0].logprobs.content or ()] == [[]] * len(told)


@pytest.mark.parametrize("model", MODELS)
async def test_completions(client: openai.AsyncOpenAI, model: str) -> None:
    """In OpenAI's older form: lists side by side, with the place of each token in the text."""
    options: Any = {"model": model, "prompt": TEXT, "max_tokens": MAX_TOKENS, "logprobs": 2}
    whole = await client.completions.create(**options)
    [choice] = whole.choices
    told = choice.logprobs
    assert told is not None
    check_told(told.model_dump(), CompletionLogprobsBuilder().build_next(await told_by_provider(2, raw=True)), model)
    assert "".join(told.tokens or ()) == choice.text
    assert all(choice.text[i:].startswith(t) for i, t in zip(told.text_offset or (), told.tokens or (), strict=True))
    assert all(token in top for token, top in zip(told.tokens or (), told.top_logprobs or (), strict=True))

    streamed: dict[str, list[Any]] = {}
    async for chunk in await client.completions.create(**options, stream=True):
        piece = chunk.choices[0].logprobs
        for name, values in ({} if piece is None else piece.model_dump()).items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == told.model_dump()
    options["logprobs"] = 0
    alone = (await client.completions.create(**options)).choices[0].logprobs
    assert alone is not None
    assert (alone.token_logprobs, alone.top_logprobs) == (told.token_logprobs, None)


@pytest.mark.parametrize("model", MODELS)
async def test_responses(client: openai.AsyncOpenAI, model: str) -> None:
    """In the text's part, and in each event of it."""
    options: Any = {"model": model, "input": TEXT, "max_output_tokens": MAX_TOKENS, "include": INCLUDE}
    whole = await client.responses.create(**options, top_logprobs=2)
    message: Any = whole.output[0]
    [part] = message.content
    expected = dump(part.logprobs)
    check_told(expected, convert_logprobs_to_openai(await told_by_provider(2)), model)
    assert whole.top_logprobs == 2

    told: list[Any] = []
    events: list[Any] = [event async for event in await client.responses.create(**options, top_logprobs=2, stream=True)]
    for event in events:
        if event.type == "response.output_text.delta":
            told += [(entry.token, entry.logprob, len(entry.top_logprobs)) for entry in event.logprobs]
        elif event.type == "response.output_text.done":
            assert len(event.logprobs) == len(expected)
        elif event.type == "response.incomplete":
            assert dump(event.response.output[0].content[0].logprobs) == expected
    assert told == [(entry["token"], entry["logprob"], 2) for entry in expected]
    assert events[-1].type == "response.incomplete"


async def test_without_asking_there_are_none(url: str) -> None:
    """`null`, and empty lists of responses."""
    async with asking(url) as server:
        chat = await server.post("/v1/chat/completions", ask("/v1/chat/completions", model="drafted", max_tokens=3))
        text = await server.post("/v1/completions", ask("/v1/completions", model="drafted", max_tokens=3))
        response = await server.post("/v1/responses", ask("/v1/responses", model="drafted", max_output_tokens=3))
    assert (chat.json["choices"][0]["logprobs"], text.json["choices"][0]["logprobs"]) == (None, None)
    assert response.json["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be an integer at le"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1; it must be an integer at le"),
        ("chat/completions", {"logprobs": True, "top_logprobs": "2"}, "top_logprobs is of type str; it must be an int"),
        ("chat/completions", {"logprobs": 2}, "logprobs is of type int; it must be true or false"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs is set; it needs logprobs: true"),
        ("chat/completions", {"logprobs": True, "n": 2}, "n is set; drafted cannot serve it here: leave it out"),
        ("completions", {"logprobs": 21}, "logprobs is 21; it must be an integer at least 0 and at most 20"),
        ("completions", {"logprobs": -1}, "logprobs is -1; it must be an integer at least 0 and at most 20"),
        ("completions", {"logprobs": "2"}, "logprobs is of type str; it must be an integer"),
        ("completions", {"logprobs": 1, "echo": True}, "echo is set with logprobs"),
        ("responses", {"top_logprobs": 2}, "top_logprobs is set; it needs include: ['message.output_text.logprobs']"),
        ("responses", {"top_logprobs": 21, "include": INCLUDE}, "top_logprobs is 21; it must be an integer at least"),
        ("responses", {"top_logprobs": "2", "include": INCLUDE}, "top_logprobs is of type str; it must be an integer"),
        ("responses", {"include": "x"}, "include is of type str; it must be a list"),
    ],
)
async def test_what_is_wrong_is_one_clear_error(url: str, path: str, fields: dict[str, Any], message: str) -> None:
    async with asking(url) as server:
        reply = await server.post(f"/v1/{path}", ask(f"/v1/{path}") | {"model": "drafted"} | fields)
    check_error(f"/v1/{path}", reply)
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith(message)


def test_what_is_impossible_has_openais_number() -> None:
    """JSON has no infinity."""
    told = [TokenLogprob("a", float("-inf"), b"a")]
    assert convert_logprobs_to_openai(told)[0]["logprob"] == -9999.0
    completion = CompletionLogprobsBuilder().build_next(told)
    assert completion is not None
    assert completion["token_logprobs"] == [-9999.0]


def test_offsets_count_characters() -> None:
    """A character of several tokens counts where it ends."""
    pieces = [b"a", b"\xc3", b"\xa9", b"b"]
    told = CompletionLogprobsBuilder().build_next([TokenLogprob(p.decode(errors="replace"), -1.0, p) for p in pieces])
    assert told is not None
    assert told["text_offset"] == [0, 1, 1, 2]
