"""A server for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.wire import Wire, served


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A server for one test."""
    wire = Wire()
    async with served("/v1/chat/completions", wire.answer) as root:
        wire.url = f"{root}/v1"
        yield wire
