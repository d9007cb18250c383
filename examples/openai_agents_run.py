"""An agent of the OpenAI Agents SDK on the built-in pair: no key, what speculation did for the answer, and a tool.

Needs: pip install 'llm-spec[openai-agents,onnx]'
"""

import asyncio

try:
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool

    from llm_spec.integrations.openai_agents import SpeculativeModel, SpeculativeModelProvider
    from llm_spec.testing import RuleBasedProvider
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install 'llm-spec[openai-agents,onnx]'") from error


@function_tool
def add_numbers(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    provider = SpeculativeModelProvider("builtin:target", draft="lookup+builtin:draft")
    config = RunConfig(model_provider=provider, tracing_disabled=True)  # traces go to OpenAI, which needs a key
    agent = Agent(name="Coder", model_settings=ModelSettings(max_tokens=64))
    try:
        result = await Runner.run(agent, "def getregentry():", run_config=config)
        print(result.final_output)
        figures = result.raw_responses[-1].output[0].model_dump()["provider_data"]["llm_spec"]
        accepted = f"{figures['accepted_tokens']} of {figures['draft_tokens']} drafted tokens accepted"
        print(f"{figures['strategy']} ({figures['guarantee']}): {accepted}")

        streamed = Runner.run_streamed(agent, "def decode(self, input, final=False):", run_config=config)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                print(event.data.delta, end="")
        print()
    finally:
        await provider.aclose()

    # the built-in pair calls no tools; in the place of your own target is a model of a few rules
    calculator = Agent(name="Calculator", model=SpeculativeModel(RuleBasedProvider()), tools=[add_numbers])
    print((await Runner.run(calculator, "Add the numbers 3 and 4.", run_config=config)).final_output)


if __name__ == "__main__":
    asyncio.run(main())
