"""An agent of the OpenAI Agents SDK on the built-in pair: no key, and what speculation did for the answer.

Needs: pip install 'llm-spec[openai-agents,onnx]'
"""

import asyncio

try:
    from agents import Agent, ModelSettings, RunConfig, Runner

    from llm_spec.integrations.openai_agents import SpeculativeModelProvider
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install 'llm-spec[openai-agents,onnx]'") from error


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


if __name__ == "__main__":
    asyncio.run(main())
