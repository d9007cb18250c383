"""LangChain: a model calls a tool; one transcript with a draft and without, and how long each took.

    python examples/langchain_agent.py [TARGET]

TARGET is a model whose chat template takes tools, such as `torch:org/name`; the included code model without one.

Needs: pip install '.[langchain,onnx,grammar]'
"""

import statistics
import sys
import time
from typing import Literal

try:
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
    from langchain_core.tools import tool

    from llm_spec.integrations.langchain import SpeculativeChatModel
except ModuleNotFoundError as error:
    needs = "pip install '.[langchain,onnx,grammar]'"
    raise SystemExit(f"{error}; run: {needs}") from error


@tool
def read_unfinished(path: Literal["codec.py", "README.md"]) -> str:
    """The function in a file that has no body yet."""
    return "def getregentry():" if path == "codec.py" else "none"


def ask(model: SpeculativeChatModel) -> list[AIMessage]:
    """The call of the tool, then the answer to its result."""
    messages: list[BaseMessage] = [HumanMessage("Complete the function in codec.py.")]
    called = model.bind_tools([read_unfinished], tool_choice="required").invoke(messages)
    results = [read_unfinished.invoke(call) for call in called.tool_calls]
    answer = model.bind_tools([read_unfinished], tool_choice="none").invoke([*messages, called, *results])
    return [called, answer]


def main(target: str) -> None:
    seconds: dict[str, list[float]] = {"lookup": [], "alone": []}
    answers, accepted, drafted = set[str](), 0, 0
    with (
        SpeculativeChatModel(target=target, draft="lookup", max_tokens=96) as fast,
        SpeculativeChatModel(target=target, max_tokens=96) as alone,
    ):
        for _ in range(4):  # the first run of each loads its model
            for name, model in (("lookup", fast), ("alone", alone)):
                started_s = time.perf_counter()
                messages = ask(model)
                seconds[name].append(time.perf_counter() - started_s)
                answers.add(messages[-1].text)
                for message in messages:
                    figures = message.response_metadata["llm_spec"]
                    accepted += figures.get("accepted_tokens", 0)
                    drafted += figures.get("draft_tokens", 0)
    print(messages[-1].text)
    print(f"{accepted} of {drafted} drafted tokens accepted; the same answers: {len(answers) == 1}")
    fast_s, alone_s = (statistics.median(seconds[name][1:]) for name in ("lookup", "alone"))
    print(f"with a draft {fast_s:.2f} s, without {alone_s:.2f} s: {alone_s / fast_s:.2f}x as fast")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["builtin:target"])
