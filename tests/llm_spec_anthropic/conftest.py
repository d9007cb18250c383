"""A server for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.messages_wire import MessagesWire, serve


@pytest.fixture
async def wire() -> AsyncIterator[MessagesWire]:
    """A server for one test."""
    async with serve() as wire:
        yield wire


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or address from outside."""
    for name in ("API_KEY", "AUTH_TOKEN", "BASE_URL", "PROFILE", "CUSTOM_HEADERS"):
        monkeypatch.delenv(f"ANTHROPIC_{name}", raising=False)
