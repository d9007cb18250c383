"""What the tests of the OpenAI Agents SDK share: one run, whole or streamed, without traces."""

from __future__ import annotations

from typing import Any

import pytest
from agents import Agent, RunConfig, Runner

__all__ = ["HOWS", "QUIET", "run_agent"]

QUIET = RunConfig(tracing_disabled=True)
HOWS = pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])


async def run_agent(agent: Agent[Any], given: Any, is_streamed: bool, **options: Any) -> Any:
    """The result, read to its end."""
    options.setdefault("run_config", QUIET)
    if not is_streamed:
        return await Runner.run(agent, given, **options)
    streamed = Runner.run_streamed(agent, given, **options)
    async for _ in streamed.stream_events():
        pass
    return streamed
