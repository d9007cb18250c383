"""LiteLLM: a model calls a tool; one transcript with a draft and without, and how long each took.

    python examples/litellm_call.py [TARGET]

TARGET is a model whose chat template takes tools, such as `torch:org/name`; the included code model without one.

Needs: pip install '.[litellm,onnx,grammar]'
"""

import json
import statistics
import sys
import time
from typing import Any

try:
    import litellm

    from llm_spec.integrations.litellm import register
except ModuleNotFoundError as error:
    needs = "pip install '.[litellm,onnx,grammar]'"
    raise SystemExit(f"{error}; run: {needs}") from error

PATHS = {
    "properties": {"path": {"enum": ["codec.py", "README.md"]}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "read_unfinished", "parameters": {"type": "object", **PATHS}}}]


def read_unfinished(path: str) -> str:
    """The function in a file that has no body yet."""
    return "def getregentry():" if path == "codec.py" else "none"


def ask(model: str) -> list[Any]:
    """The call of the tool, then the answer to its result."""
    messages: list[Any] = [{"role": "user", "content": "Complete the function in codec.py."}]
    options: Any = {"model": model, "tools": TOOLS, "max_tokens": 96}
    called = litellm.completion(messages=messages, tool_choice="required", **options)
    messages.append(called.choices[0].message.model_dump(exclude_none=True))
    for call in called.choices[0].message.tool_calls:
        content = read_unfinished(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return [called, litellm.completion(messages=messages, tool_choice="none", **options)]


def main(target: str) -> None:
    seconds: dict[str, list[float]] = {"fast": [], "alone": []}
    answers, accepted, drafted = set[str](), 0, 0
    with register(model="fast", target=target, draft="lookup"), register(model="alone", target=target):
        for _ in range(4):  # the first run of each loads its model
            for name in ("fast", "alone"):
                started_s = time.perf_counter()
                responses = ask(f"llm_spec/{name}")
                seconds[name].append(time.perf_counter() - started_s)
                message = responses[-1].choices[0].message
                answers.add(message.content)
                for response in responses:
                    figures = response.choices[0].message.provider_specific_fields["llm_spec"]
                    accepted += figures.get("accepted_tokens", 0)
                    drafted += figures.get("draft_tokens", 0)
    print(message.content)
    print(f"{accepted} of {drafted} drafted tokens accepted; the same answers: {len(answers) == 1}")
    fast_s, alone_s = (statistics.median(seconds[name][1:]) for name in ("fast", "alone"))
    print(f"with a draft {fast_s:.2f} s, without {alone_s:.2f} s: {alone_s / fast_s:.2f}x as fast")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["builtin:target"])
