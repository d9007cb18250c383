"""Servers that several tests share."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
from support.serving import HANGS_S, RULES, Post, Reply, serving_in_thread

from llm_spec import SpeculativeConfig
from llm_spec.server import ModelConfig


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Posts bytes to a server in a thread of its own: `fast` answers by rules, `local` is the built-in pair."""
    local = ModelConfig(target="builtin:target", draft="lookup", speculative=SpeculativeConfig(max_total_tokens=3))
    with serving_in_thread({"fast": RULES, "local": local}) as url:
        yield from _connect(url)


def _connect(url: str) -> Iterator[Post]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=HANGS_S)

    def send(path: str, data: bytes) -> Reply:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers.items()), response.read())

    try:
        yield send
    finally:
        connection.close()
