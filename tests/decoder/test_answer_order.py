"""Which order of an answer's parts is noted: only one that is not reasoning, then text, then calls."""

from __future__ import annotations

from typing import Final

import pytest

from llm_spec import ChatRequest, Finish, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.decoder.answer_order import AnswerPart
from llm_spec.decoder.decoder import SpeculativeDecoder
from llm_spec.decoder.result import SpeculativeFinish, SpeculativeResult
from llm_spec.testing import ScriptedProvider

ASKED: Final = ChatRequest.create("hi")


def call(index: int, arguments: str = "{}") -> ToolCallDelta:
    return ToolCallDelta(index, f"c{index}", "f", arguments)


R, T = ReasoningDelta, TextDelta
ORDERS: Final[dict[str, tuple[list[StreamEvent], tuple[AnswerPart, ...]]]] = {
    "text": ([T("a"), T("b")], ()),
    "all in their order": ([R("r"), R("s"), T("a"), call(0), call(1)], ()),
    "a call whose number is not the next": ([T("a"), call(3)], ()),
    "calls in pieces": ([call(0, "{"), call(0, "}"), call(1)], ()),
    "text behind a call": ([call(0), T("ab"), T("c")], (("call", 0), ("text", 3))),
    "text between the pieces of a call": ([call(0, "{"), T("a"), call(0, "}")], (("call", 0), ("text", 1))),
    "text between calls": ([T("a"), call(0), T("b"), call(1)], (("text", 1), ("call", 0), ("text", 1), ("call", 1))),
    "calls the other way round": ([call(5), call(2)], (("call", 1), ("call", 0))),
    "reasoning behind a text": ([R("r"), T("a"), R("st"), R("u")], (("reasoning", 1), ("text", 1), ("reasoning", 3))),
    "reasoning behind a call": ([call(0), R("r"), call(1)], (("call", 0), ("reasoning", 1), ("call", 1))),
    "empty texts": ([T(""), R("r"), T(""), T("a"), call(0), T("")], ()),
}


@pytest.mark.parametrize("case", ORDERS)
async def test_the_order_is_noted_where_it_is_not_the_usual_one(case: str) -> None:
    """And whatever it is, the parts come back as they came."""
    events, order = ORDERS[case]
    result = await decode(events)
    assert result.order == order
    texts = [event for event in events if not (isinstance(event, TextDelta | ReasoningDelta) and not event.text)]
    assert join(list(result.iterate_answer())) == join(texts)


async def decode(events: list[StreamEvent]) -> SpeculativeResult:
    target = ScriptedProvider([*events, Finish("stop")])
    async with SpeculativeDecoder(target=target, draft=None).stream(ASKED) as stream:
        async for event in stream:
            if isinstance(event, SpeculativeFinish) and event.result is not None:
                return event.result
    raise AssertionError


def join(events: list[StreamEvent]) -> list[str]:
    """Each part as one text, by the order in which they began."""
    parts: dict[str, str] = {}
    names: list[str] = []
    for event in events:
        if isinstance(event, ToolCallDelta):
            name, text = event.id or "", event.arguments
        elif isinstance(event, TextDelta | ReasoningDelta):
            kind = type(event).__name__
            is_next = bool(names) and names[-1].startswith(kind)
            name, text = names[-1] if is_next else f"{kind} {len(names)}", event.text
        else:
            continue
        if text and name not in names:
            names.append(name)
        parts[name] = parts.get(name, "") + text
    return [f"{name.split()[0]}: {parts[name]}" for name in names]
