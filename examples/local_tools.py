"""A model in this process, given a chat template for tools, calls one: one transcript, with a draft and without.

Needs: pip install 'llm-spec[onnx,grammar]'
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

import llm_spec_onnx

from llm_spec import ChatMessage, SpeculativeDecoder

SCHEMA = {"properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", **SCHEMA}}}]
QUESTION = ChatMessage("user", "Weather in Rome?")
ONE_CALL = {"parallel_tool_calls": False}
TEMPLATE = """Tools: {{ tools | tojson }}. Call one with <tool_call>{"name": …, "arguments": …}</tool_call>.
{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"""


async def main(target: str) -> None:
    answers: list[object] = []
    for draft in ("lookup+builtin:draft", None):
        async with SpeculativeDecoder(target=target, draft=draft) as model:
            asked = await model.decode([QUESTION], tools=TOOLS, tool_choice="required", extra=ONE_CALL)
            result = ChatMessage("tool", "It rains.", tool_call_id=asked.tool_calls[0].id)
            answer = await model.decode([QUESTION, asked.message, result], tools=TOOLS, max_tokens=16)
            print(f"{asked.strategy}: {asked.tool_calls[0].arguments}, {asked.stats.summary()}")
            answers.append((asked.tool_calls, answer.content))
    print("the same call and answer:", answers[0] == answers[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(str(llm_spec_onnx.__file__)).parent / "builtin/target", folder, dirs_exist_ok=True)
        Path(folder, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        asyncio.run(main(f"onnx:{folder}"))
