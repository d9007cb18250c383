"""A pydantic-ai agent that calls a tool: one transcript with a draft and without, and how long each took.

    python examples/pydantic_ai_agent.py [TARGET]

TARGET is a model whose chat template takes tools, such as `torch:org/name`; the included code model without one.

Needs: pip install '.[pydantic-ai,onnx,grammar]'
"""

import asyncio
import statistics
import sys
import time
from typing import Literal

try:
    from pydantic_ai import Agent, ModelSettings, RunContext

    from llm_spec.integrations.pydantic_ai import SpeculativeModel
except ModuleNotFoundError as error:
    needs = "pip install '.[pydantic-ai,onnx,grammar]'"
    raise SystemExit(f"{error}; run: {needs}") from error


def read_unfinished(path: Literal["codec.py", "README.md"]) -> str:
    """The function in a file that has no body yet."""
    return "def getregentry():" if path == "codec.py" else "none"


def choose_settings(context: RunContext[None]) -> ModelSettings:
    """First a call of the tool, then an answer in words."""
    return ModelSettings(tool_choice="required" if context.run_step == 1 else "none", max_tokens=96)


async def main(target: str) -> None:
    seconds: dict[str, list[float]] = {"lookup": [], "alone": []}
    answers, accepted, drafted = set[str](), 0, 0
    async with (
        Agent(SpeculativeModel(target, draft="lookup"), tools=[read_unfinished]) as fast,
        Agent(SpeculativeModel(target), tools=[read_unfinished]) as alone,
    ):
        for _ in range(4):  # the first run of each loads its model
            for name, agent in (("lookup", fast), ("alone", alone)):
                started_s = time.perf_counter()
                result = await agent.run("Complete the function in codec.py.", model_settings=choose_settings)
                seconds[name].append(time.perf_counter() - started_s)
                answers.add(result.output)
                for message in result.new_messages():
                    details = getattr(message, "provider_details", None) or {}
                    accepted += details.get("accepted_tokens", 0)
                    drafted += details.get("draft_tokens", 0)
    print(result.output)
    print(f"{accepted} of {drafted} drafted tokens accepted; the same answers: {len(answers) == 1}")
    fast_s, alone_s = (statistics.median(seconds[name][1:]) for name in ("lookup", "alone"))
    print(f"with a draft {fast_s:.2f} s, without {alone_s:.2f} s: {alone_s / fast_s:.2f}x as fast")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["builtin:target"]))
