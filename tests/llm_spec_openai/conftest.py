"""A server for one test, and no environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import httpx2
import pytest
from llm_spec_openai import client
from support.wire import Wire, served


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK takes keys and addresses from the environment; of these tests' machine it gets none."""
    for name in list(os.environ):
        if "OPENAI" in name:
            monkeypatch.delenv(name)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A server for one test."""
    wire = Wire()
    async with served("/{path:.*}", wire.answer) as root:
        wire.url = f"{root}/v1"
        yield wire


@pytest.fixture(params=["aiohttp", "httpx2"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The SDK's two transports, the second as where aiohttp is not fit for it."""
    if request.param == "httpx2":
        monkeypatch.setattr(client, "DefaultAioHttpClient", _unfit)
    return request.param


def _unfit(**_: object) -> httpx2.AsyncClient:
    raise RuntimeError("To use the aiohttp client you must have installed the package with the `aiohttp` extra")
