"""How long a target may be silent."""

from __future__ import annotations

import asyncio

import pytest

from llm_spec.chunk_timeouts import ChunkTimeouts
from llm_spec.config import Timeouts
from llm_spec.errors import TransientError

pytestmark = pytest.mark.virtual_clock


async def test_a_late_first_chunk_is_a_transient_error() -> None:
    """The error names the target and the seconds."""
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts(first_chunk_s=2.0))
    with pytest.raises(TransientError, match=r"vllm:tiny was silent for 2\.0 s"):
        await timeouts.wait_for_first_chunk(asyncio.sleep(2.1))


async def test_in_time_is_not_late() -> None:
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts(first_chunk_s=2.0))
    assert await timeouts.wait_for_first_chunk(asyncio.sleep(1.9, "chunk")) == "chunk"


async def test_without_a_timeout_nothing_is_late() -> None:
    timeouts = ChunkTimeouts("vllm:tiny", Timeouts())
    assert await timeouts.wait_for_first_chunk(asyncio.sleep(1e6, "chunk")) == "chunk"
