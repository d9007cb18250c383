"""Packed bodies: unpacked for those who may ask, and as far as a body may be long; others are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from support.serving import ENDPOINTS, HANGS_S, ask, check_error, serving

from llm_spec.server import KeyConfig
from llm_spec.server.content_encoding import BodyUnpacker, find_content_encoding
from llm_spec.server.problems import HttpProblem

CHAT: Final = "/v1/chat/completions"
KEY: Final = "sk-alice-0123"
COUNT: Final = "/v1/messages/count_tokens"


def bare_deflate(data: bytes) -> bytes:
    """Without zlib's header, as some clients send it."""
    return zlib.compress(data)[2:-4]


def in_two_parts(data: bytes) -> bytes:
    return gzip.compress(data[:10]) + gzip.compress(data[10:])


PACKED: Final = [
    ("gzip", gzip.compress),
    ("GZIP", gzip.compress),
    (" gzip ", gzip.compress),
    ("gzip", in_two_parts),
    ("deflate", zlib.compress),
    ("deflate", bare_deflate),
    ("identity", bytes),
    ("", bytes),
]
GOOD: Final = gzip.compress(json.dumps(ask(CHAT)).encode())
BROKEN: Final = {
    "nothing": ("gzip", b""),
    "anything": ("gzip", b"x" * 200),
    "no end": ("gzip", GOOD[:-9]),
    "no checksum": ("gzip", GOOD[:-4]),
    "another checksum": ("gzip", GOOD[:-8] + b"\0" * 8),
    "something after it": ("gzip", GOOD + b"x"),
    "too many parts": ("gzip", gzip.compress(b"{}") + gzip.compress(b"") * 1000),
    "deflate as gzip": ("gzip", zlib.compress(b"{}")),
    "gzip as deflate": ("deflate", GOOD),
    "nothing deflated": ("deflate", b""),
    "anything deflated": ("deflate", b"x" * 200),
    "deflate without end": ("deflate", zlib.compress(b"{}" * 100)[:-6]),
}


@pytest.mark.parametrize("length", [1, 500_000])
@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize("path", [*ENDPOINTS, COUNT])
async def test_a_packed_body_is_read(path: str, encoding: str, pack: Any, length: int) -> None:
    body = ask(path.removesuffix("/count_tokens"), "x" * length)
    async with serving() as server:
        reply = await server.post(path, pack(json.dumps(body).encode()), Content_Encoding=encoding)
    assert reply.status == 200


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("path", [*ENDPOINTS, COUNT])
async def test_a_body_that_is_not_packed_as_it_says_is_refused(
    path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the client's mistake, no failure: the connection serves on and no error is logged."""
    encoding, data = BROKEN[name]
    async with serving() as server:
        reply = await server.post(path, data, Content_Encoding=encoding)
        assert (await server.chat()).status == 200
    assert reply.status == 400
    check_error(path.removesuffix("/count_tokens"), reply)
    assert encoding in reply.error["message"]
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x-gzip", "x" * 5000])
async def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    """415, and the error says which there are."""
    async with serving() as server:
        reply = await server.post(CHAT, GOOD, Content_Encoding=encoding)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_encoding")
    assert reply.error["type"] == "invalid_request_error"
    assert "gzip or deflate" in reply.error["message"]
    assert len(reply.data) < 500


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", CHAT, None, 401),
        ("POST", CHAT, "sk-mallory-0123", 401),
        ("POST", COUNT, None, 401),
        ("POST", "/v1/nothing", KEY, 404),
        ("POST", "/health", None, 405),
        ("GET", "/", None, 200),
        ("GET", "/health/live", None, 200),
        ("GET", "/v1/models", KEY, 200),
        ("GET", "/metrics", None, 401),
        ("OPTIONS", CHAT, None, 204),
    ],
)
async def test_what_nobody_reads_is_not_unpacked(
    method: str, path: str, key: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before a request was let in, nor where a path has no use for a body, nor while a refused one is read away."""
    num_unpacked = count_unpacked(monkeypatch)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with serving(keys={"alice": KeyConfig(key=KEY)}) as server:
        reply = await server.send(method, path, bomb(), Content_Encoding="gzip", **headers)
        assert reply.status == status
        assert num_unpacked == []
        await server.post(CHAT, GOOD, Content_Encoding="gzip", Authorization=f"Bearer {KEY}")
        assert num_unpacked  # this is what is counted


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_is_unpacked_no_further_than_a_body_may_be_long(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unpacked: list[int] = []
    read_piece = BodyUnpacker.read_piece

    def counting(unpacker: BodyUnpacker) -> bytes:
        piece = read_piece(unpacker)
        num_unpacked.append(len(piece))
        return piece

    monkeypatch.setattr(BodyUnpacker, "read_piece", counting)
    async with serving(max_body_bytes=1_000_000) as server:
        reply = await server.post(CHAT, bomb(encoding), Content_Encoding=encoding)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert max(num_unpacked) <= 2**18
    assert sum(num_unpacked) <= 1_000_000 + 2**18


async def test_a_packed_body_is_as_long_as_it_comes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long packed is not unpacked."""
    num_unpacked = count_unpacked(monkeypatch)
    async with serving(max_body_bytes=1000) as server:
        reply = await server.post(CHAT, bomb(), Content_Encoding="gzip")
    assert reply.status == 413
    assert num_unpacked == []


async def test_all_long_bodies_together_are_bounded_unpacked() -> None:
    """A body counts by what it stands for, and no longer than it is held."""
    data, gone_on = json.dumps(ask(CHAT, "x" * 300_000)).encode(), asyncio.Event()
    packed = gzip.compress(data)

    async def slow() -> AsyncIterator[bytes]:
        yield data[:200_000]
        await gone_on.wait()
        yield data[200_000:]

    async with serving(max_body_bytes=400_000, max_bodies_bytes=450_000) as server:
        first = asyncio.create_task(server.send("POST", CHAT, slow()))
        async with asyncio.timeout(HANGS_S):
            while (refused := await server.post(CHAT, packed, Content_Encoding="gzip")).status == 200:
                pass  # until the first has begun
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        gone_on.set()
        assert (await first).status == 200
        assert (await server.post(CHAT, packed, Content_Encoding="gzip")).status == 200


@pytest.mark.parametrize("header", [None, "identity", "Identity"])
def test_no_encoding(header: str | None) -> None:
    assert find_content_encoding(header) is None


def test_pieces_are_all_of_it() -> None:
    """Pieces put together are the body, also where zlib still holds output when it has been given all."""
    data = bytes(2**18) * 3 + b"end"
    unpacker = BodyUnpacker("gzip", gzip.compress(data))
    pieces: list[bytes] = []
    while piece := unpacker.read_piece():
        pieces.append(piece)
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 2**18
    assert unpacker.read_piece() == b""


def test_an_unknown_encoding_is_quoted_in_part() -> None:
    with pytest.raises(HttpProblem, match=r"'x{40}'"):
        find_content_encoding("x" * 100)


def bomb(encoding: str = "gzip") -> bytes:
    """Some kilobytes that stand for 20 MB."""
    return (gzip.compress if encoding == "gzip" else zlib.compress)(b" " * 20_000_000)


def count_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each body that anything begins to unpack with zlib."""
    num_unpacked: list[int] = []
    original = zlib.decompressobj

    def counting(*args: Any, **kwargs: Any) -> Any:
        num_unpacked.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(zlib, "decompressobj", counting)
    return num_unpacked
