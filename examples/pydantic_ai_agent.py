"""A pydantic-ai agent on the built-in pair: the answer, what speculation did for it, and a tool.

Needs: pip install 'llm-spec[pydantic-ai,onnx]'
"""

import asyncio

try:
    from pydantic_ai import Agent

    from llm_spec.integrations.pydantic_ai import SpeculativeModel
    from llm_spec.testing import RuleBasedProvider
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install 'llm-spec[pydantic-ai,onnx]'") from error


async def main() -> None:
    model = SpeculativeModel("builtin:target", draft="lookup+builtin:draft", settings={"max_tokens": 64})
    async with Agent(model) as agent:
        result = await agent.run("def getregentry():")
        print(result.output)
        details = result.response.provider_details or {}
        accepted = f"{details['accepted_tokens']} of {details['draft_tokens']} drafted tokens accepted"
        print(f"{details['strategy']} ({details['guarantee']}): {accepted}")

        async with agent.run_stream("def decode(self, input, final=False):") as answer:
            async for piece in answer.stream_text(delta=True):
                print(piece, end="")
        print()

    # the built-in pair calls no tools; in the place of your own target is a model of a few rules
    agent_with_tool = Agent(SpeculativeModel(RuleBasedProvider()))

    @agent_with_tool.tool_plain
    def add_numbers(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    print((await agent_with_tool.run("Add the numbers 3 and 4.")).output)


if __name__ == "__main__":
    asyncio.run(main())
