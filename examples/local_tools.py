"""A model in this process calls a tool: one transcript, with a draft and without, and how long each took.

Needs: pip install '.[onnx,grammar]'
"""

import asyncio

from llm_spec import ChatMessage, SpeculativeDecoder

SCHEMA = {"properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", **SCHEMA}}}]
QUESTION = ChatMessage("user", "Weather in Rome?")
ONE_CALL = {"parallel_tool_calls": False}


async def main() -> None:
    answers: list[object] = []
    for draft in ("lookup+builtin:draft", None):
        async with SpeculativeDecoder(target="builtin:target", draft=draft) as model:
            asked = await model.decode([QUESTION], tools=TOOLS, tool_choice="required", extra=ONE_CALL)
            result = ChatMessage("tool", "It rains.", tool_call_id=asked.tool_calls[0].id)
            answer = await model.decode([QUESTION, asked.message, result], tools=TOOLS, max_tokens=16)
            print(f"{asked.tool_calls[0].arguments}\n  {asked.strategy}: {asked.stats.summary()}")
            answers.append((asked.tool_calls, answer.content))
    print("the same call and answer:", answers[0] == answers[1])


if __name__ == "__main__":
    asyncio.run(main())
