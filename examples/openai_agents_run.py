"""The OpenAI Agents SDK without a key: an agent calls a tool, with a draft and without, and how long each took.

    python examples/openai_agents_run.py [TARGET]

TARGET is a model whose chat template takes tools, such as `torch:org/name`; the included code model without one.

Needs: pip install '.[openai-agents,onnx,grammar]'
"""

import asyncio
import statistics
import sys
import time
from typing import Literal

try:
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool

    from llm_spec.integrations.openai_agents import SpeculativeModelProvider
except ModuleNotFoundError as error:
    needs = "pip install '.[openai-agents,onnx,grammar]'"
    raise SystemExit(f"{error}; run: {needs}") from error


@function_tool
def read_unfinished(path: Literal["codec.py", "README.md"]) -> str:
    """The function in a file that has no body yet."""
    return "def getregentry():" if path == "codec.py" else "none"


AGENT = Agent(
    name="Coder",
    tools=[read_unfinished],
    model_settings=ModelSettings(tool_choice="required", max_tokens=96),  # after the call the SDK says "auto"
)


async def main(target: str) -> None:
    seconds: dict[str, list[float]] = {"lookup": [], "alone": []}
    answers, accepted, drafted = set[str](), 0, 0
    providers = {"lookup": SpeculativeModelProvider(target, draft="lookup"), "alone": SpeculativeModelProvider(target)}
    try:
        for _ in range(4):  # the first run of each loads its model
            for name, provider in providers.items():
                # traces go to OpenAI, which needs a key
                config = RunConfig(model_provider=provider, tracing_disabled=True)
                started_s = time.perf_counter()
                result = await Runner.run(AGENT, "Complete the function in codec.py.", run_config=config)
                seconds[name].append(time.perf_counter() - started_s)
                answers.add(result.final_output)
                for response in result.raw_responses:
                    figures = response.output[0].model_dump()["provider_data"]["llm_spec"]
                    accepted += figures.get("accepted_tokens", 0)
                    drafted += figures.get("draft_tokens", 0)
    finally:
        for provider in providers.values():
            await provider.aclose()
    print(result.final_output)
    print(f"{accepted} of {drafted} drafted tokens accepted; the same answers: {len(answers) == 1}")
    fast_s, alone_s = (statistics.median(seconds[name][1:]) for name in ("lookup", "alone"))
    print(f"with a draft {fast_s:.2f} s, without {alone_s:.2f} s: {alone_s / fast_s:.2f}x as fast")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["builtin:target"]))
