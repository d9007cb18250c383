"""Agents of other frameworks that work on a small project with a real model in this process, with drafts and without.

    python benchmarks/agent_loops.py --framework pydantic-ai --model onnx:FOLDER [--drafts lookup suffix] [--loops 10]
    python benchmarks/agent_loops.py --framework langchain --model torch:FOLDER

Needs the extras of the framework and the model, and `grammar`; for LangChain also `pip install langchain`. The chat
template of the model must list `tools`. A loop is a request that must call a tool, held by a grammar, and the tool's
result; which tool is due follows a plan, for all runs alike, and what it is given the model chooses. After the loops
comes an answer in words. All runs work at the same time, each on a copy of the project, and take turns: request for
request. Transcripts are compared byte for byte. Seconds are of whole requests, by this program's clock; ratios are to
the same request of the run without a draft.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import operator
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from llm_spec import ChatRequest, LlmProvider, LlmSpecError, open_draft, open_provider

FILES: Final = {
    "shop/cart.py": '''"""A cart of items."""

from shop.tax import TAX_RATE


class Cart:
    def __init__(self) -> None:
        self.items: list[tuple[str, float, int]] = []

    def add(self, name: str, price: float, count: int = 1) -> None:
        self.items.append((name, price, count))

    def total(self) -> float:
        net = sum(price * count for _, price, count in self.items)
        return round(net * (1 + TAX_RATE), 2)
''',
    "shop/tax.py": '"""What the state takes."""\n\nTAX_RATE = 0.19\nREDUCED_TAX_RATE = 0.07\n',
    "tests/test_cart.py": """from shop.cart import Cart


def test_total() -> None:
    cart = Cart()
    cart.add("tea", 4.0, 2)
    cart.add("cup", 7.5)
    assert cart.total() == 18.45
""",
    "README.md": "# shop\n\nA cart, and its tax. Run the tests with `pytest`.\n",
}
FilePath = Literal["shop/cart.py", "shop/tax.py", "tests/test_cart.py", "README.md"]
Line = Annotated[str, Field(max_length=80)]
Content = Annotated[str, Field(max_length=160)]
OPERATORS: Final[dict[type, Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
PLAN: Final = (
    "list_files",
    "read_file",
    "search",
    "read_file",
    "edit_file",
    "read_file",
    "calculate",
    "write_file",
    "search",
    "edit_file",
)
SYSTEM: Final = "You are a coding agent. You work on the files of a project with your tools."
TASK: Final = (
    "The reduced tax rate shall be used for tea. Read the code, change shop/tax.py and shop/cart.py, and test it."
)
EXAMPLE_QUESTION: Final = "What is 17 * 3?"
EXAMPLE_ARGUMENTS: Final = {"expression": "17 * 3"}


class Project:
    """The tools, over a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    def list_files(self) -> str:
        """The paths of all files of the project."""
        return "\n".join(FILES)

    def read_file(self, path: FilePath) -> str:
        """The whole text of a file."""
        return (self._root / path).read_text("utf-8")

    def search(self, text: Line) -> str:
        """The lines of all files that have this text, with their paths and numbers."""
        found = [
            f"{name}:{number}: {line}"
            for name in FILES
            for number, line in enumerate((self._root / name).read_text("utf-8").splitlines(), 1)
            if text in line
        ]
        return "\n".join(found) or "no line has this text"

    def edit_file(self, path: FilePath, old: Line, new: Line) -> str:
        """Replace a text that a file has by another."""
        text = (self._root / path).read_text("utf-8")
        if not old or old not in text:
            return f"{path} does not have this text"
        (self._root / path).write_text(text.replace(old, new, 1), "utf-8")
        return f"changed {path}"

    def write_file(self, path: FilePath, content: Content) -> str:
        """Write the whole text of a file."""
        (self._root / path).write_text(content, "utf-8")
        return f"wrote {path}"

    def calculate(self, expression: Line) -> str:
        """The value of an arithmetic expression."""
        try:
            return f"{evaluate(ast.parse(expression, mode='eval').body):g}"
        except (SyntaxError, ValueError, ArithmeticError) as error:
            return f"error: {error}"

    @property
    def tools(self) -> list[Any]:
        return [self.list_files, self.read_file, self.search, self.edit_file, self.write_file, self.calculate]


def evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ValueError("only numbers and + - * / are known")


@dataclass
class Run:
    """One agent's run: how it goes, and what came of it."""

    draft: str | None
    num_loops: int
    options: dict[str, Any]
    turns: asyncio.Lock
    seconds: list[float] = field(default_factory=list[float])
    transcript: bytes = b""
    figures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_tokens: list[int] = field(default_factory=list[int])

    @property
    def due_tool(self) -> str | None:
        """The tool of the next request; None: an answer in words is due."""
        step = len(self.seconds)
        return PLAN[step % len(PLAN)] if step < self.num_loops else None

    @asynccontextmanager
    async def take_turn(self) -> AsyncIterator[None]:
        """A request; those of other runs wait, first come, first served."""
        async with self.turns:
            started_s = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - started_s)


# ------------------------------------------------------------------------------------------ pydantic-ai


async def run_pydantic_ai(run: Run, target: LlmProvider, project: Project) -> None:
    from pydantic_ai import Agent, ModelSettings
    from pydantic_ai.messages import (
        ModelMessagesTypeAdapter,
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )
    from pydantic_ai.models.wrapper import WrapperModel

    from llm_spec.integrations.pydantic_ai import SpeculativeModel

    class InTurnModel(WrapperModel):
        async def request(self, *given: Any, **options: Any) -> ModelResponse:
            async with run.take_turn():
                return await super().request(*given, **options)

    def choose_settings(_: object) -> ModelSettings:
        tool = run.due_tool
        return ModelSettings(tool_choice="none" if tool is None else [tool], parallel_tool_calls=False, **run.options)

    draft = None if run.draft is None else open_draft(run.draft)
    model = InTurnModel(SpeculativeModel(target, draft=draft))
    agent = Agent(model, tools=project.tools, model_settings=choose_settings)
    history = [
        ModelRequest(parts=[SystemPromptPart(SYSTEM), UserPromptPart(EXAMPLE_QUESTION)]),
        ModelResponse(parts=[ToolCallPart("calculate", EXAMPLE_ARGUMENTS, "call_0")]),
        ModelRequest(parts=[ToolReturnPart("calculate", project.calculate(**EXAMPLE_ARGUMENTS), "call_0")]),
        ModelResponse(parts=[TextPart("It is 51.")]),
    ]
    messages = (await agent.run(TASK, message_history=history)).new_messages()
    dumped = ModelMessagesTypeAdapter.dump_python(messages, mode="json")
    for part in (part for message in dumped for part in message["parts"] if part["part_kind"] == "retry-prompt"):
        part.pop("tool_call_id")  # where no call is meant it is random
    names = ("timestamp", "provider_details", "model_name", "model_id", "run_id", "conversation_id", "failed_attempts")
    run.transcript = dump(dumped, *names)
    for message in messages:
        if isinstance(message, ModelResponse):
            run.figures.append(message.provider_details or {})
            run.num_tokens.append(message.usage.output_tokens)


# -------------------------------------------------------------------------------------------- LangChain


async def run_langchain(run: Run, target: LlmProvider, project: Project) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, message_to_dict
    from langchain_core.tools import StructuredTool

    from llm_spec.integrations.langchain import SpeculativeChatModel

    @wrap_model_call
    async def take_turn(request: Any, handler: Any) -> Any:
        settings = {"parallel_tool_calls": False, "strict": True, **run.options}
        async with run.take_turn():
            return await handler(request.override(tool_choice=run.due_tool or "none", model_settings=settings))

    draft = None if run.draft is None else open_draft(run.draft)
    model = SpeculativeChatModel(target=target, draft=draft)
    tools = [StructuredTool.from_function(tool) for tool in project.tools]
    agent = create_agent(model, tools=tools, middleware=[take_turn])
    call: Any = {"name": "calculate", "args": EXAMPLE_ARGUMENTS, "id": "call_0"}
    history = [
        SystemMessage(SYSTEM),
        HumanMessage(EXAMPLE_QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage(project.calculate(**EXAMPLE_ARGUMENTS), tool_call_id="call_0"),
        AIMessage("It is 51."),
        HumanMessage(TASK),
    ]
    config: Any = {"recursion_limit": 10 * run.num_loops + 10}
    messages = (await agent.ainvoke({"messages": history}, config))["messages"][len(history) :]
    run.transcript = dump([message_to_dict(message) for message in messages], "llm_spec", "model_name", "id")
    for message in messages:
        if isinstance(message, AIMessage):
            run.figures.append(message.response_metadata["llm_spec"])
            run.num_tokens.append(message.usage_metadata["output_tokens"] if message.usage_metadata else 0)


FRAMEWORKS: Final = {"pydantic-ai": run_pydantic_ai, "langchain": run_langchain}


def dump(value: Any, *left_out: str) -> bytes:
    """What a message says, but for members that say when, by what and how fast it was."""

    def strip(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: strip(member) for name, member in part.items() if name not in left_out}
        return [strip(member) for member in part] if isinstance(part, list) else part

    return json.dumps(strip(value), ensure_ascii=False, indent=1).encode()


# -------------------------------------------------------------------------------------------- figures


def describe(run: Run, plain: Run) -> str:
    num_tokens = sum(run.num_tokens)
    accepted = sum(figures.get("accepted_tokens", 0) for figures in run.figures)
    requests = sum(figures.get("draft_tokens", 0) > 0 for figures in run.figures)
    ratios = [before / now for before, now in zip(plain.seconds, run.seconds, strict=False)]
    is_same = "the same transcript" if run.transcript == plain.transcript else "ANOTHER TRANSCRIPT"
    return (
        f"{run.draft or 'plain':8} {is_same}; {requests} of {len(run.figures)} requests speculated, "
        f"{accepted} of {num_tokens} tokens drafted ({accepted / num_tokens:.0%}); "
        f"{statistics.median(run.seconds):.2f} s a request, "
        f"median {statistics.median(ratios):.2f}x, worst {min(ratios):.2f}x, "
        f"together {sum(plain.seconds) / sum(run.seconds):.2f}x"
    )


def list_steps(runs: list[Run]) -> Iterator[str]:
    """A line for each request: its seconds without a draft; with each, the ratio to them and the share it drafted."""
    plain, *drafted = runs
    for step in range(min(len(run.seconds) for run in runs)):
        tool = PLAN[step % len(PLAN)] if step < plain.num_loops else "answer"
        line = f"{step + 1:3} {tool:10} {plain.num_tokens[step]:4} tokens  plain {plain.seconds[step]:6.2f} s"
        for run in drafted:
            share = run.figures[step]["accepted_tokens"] / run.num_tokens[step]
            line += f"  {run.draft} {plain.seconds[step] / run.seconds[step]:.2f}x ({share:.0%})"
        yield line


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", required=True, choices=FRAMEWORKS)
    parser.add_argument("--model", required=True, help="a local model: torch:FOLDER or onnx:FOLDER")
    parser.add_argument("--drafts", nargs="+", default=["lookup", "suffix"])
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--transcripts", type=Path, help="a folder for them, one file for each run")
    arguments = parser.parse_args()
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "seed": 1}
    start, turns = FRAMEWORKS[arguments.framework], asyncio.Lock()
    runs = [Run(draft, arguments.loops, options, turns) for draft in (None, *arguments.drafts)]
    try:
        target = open_provider(arguments.model)
        await target.complete(ChatRequest.create("Hello", max_tokens=2))  # what a process does once is not timed
        with tempfile.TemporaryDirectory() as folder:
            projects = [Project(Path(folder, str(index))) for index in range(len(runs))]
            await asyncio.gather(*(start(run, target, project) for run, project in zip(runs, projects, strict=True)))
    except ModuleNotFoundError as error:
        more = " langchain" if arguments.framework == "langchain" else ""
        raise SystemExit(f"{error}; run: pip install '.[{arguments.framework},onnx,grammar]'{more}") from error
    except LlmSpecError as error:
        raise SystemExit(str(error)) from error
    if arguments.transcripts is not None:
        arguments.transcripts.mkdir(parents=True, exist_ok=True)
        for run in runs:
            (arguments.transcripts / f"{run.draft or 'plain'}.json").write_bytes(run.transcript)
    print(f"{arguments.framework}, {arguments.model}: {arguments.loops} loops, temperature {arguments.temperature:g}")
    print(*list_steps(runs), sep="\n")
    print(*(describe(run, runs[0]) for run in runs), sep="\n")
    if len({run.transcript for run in runs}) > 1:
        raise SystemExit("the transcripts differ")
    if len(runs[0].seconds) <= arguments.loops:
        raise SystemExit("an answer without a call ended the run early; --max-tokens may have cut a call")


if __name__ == "__main__":
    asyncio.run(main())
