"""Answers with tool calls and reasoning, speculated at a server: the message is the chat endpoint's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from llm_spec_http import HttpProvider
from llm_spec_http.messages import _has_broken_call
from support.message_answers import answer, answer_plain, ask, learn_worth, message, opened, speculate
from support.message_server import DRAWN, END, MessageServer, call
from support.planted_faults import planted
from support.probing import Patient

from llm_spec import (
    ChatRequest,
    Fallback,
    Finish,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    TransientError,
)
from llm_spec.contract.endpoint import ParsedMessage, TokenEndpoint
from llm_spec.contract.response import ChatResponseBuilder
from llm_spec.strategies.base import ReadyStrategy, StrategyContext, TextGuarantee
from llm_spec.strategies.message_answer import prepare_with_message_parser

pytestmark = pytest.mark.virtual_clock

ONE = call("read", '{"path": "src/app/main.py", "lines": [1, 20], "why": "it is the first file of all"}')
SUM = call("add", '{"a": 1, "b": 2}')
TWO = f"I read both of them, one after the other.\n{ONE}\n{SUM}"
UNICODE = call("read", '{"path": "größe/東京 😀.py", "text": "Schöne Grüße aus Köln"}')
BROKEN = '<tool_call>\n{"name": "read", "arguments": {"path": "a'
THOUGHT = f"<think>The user wants a file, so I read it.\n</think>\n{ONE}"
ANSWERS = {
    "one": ONE,
    "two": TWO,
    "unicode": UNICODE,
    "long": call("read", json.dumps({"lines": list(range(100))})),
    "both": f"All of its lines, from the first to the last one, in one go: {call('read', json.dumps(list(range(80))))}",
    "text": "There is no file of that name, and there never was one; 3 < 4 and <tool is no mark.",
    "broken": BROKEN,
    "not JSON": call("read", '{"path": src/app/main.py, "lines": from the first to the last one of all}'),
    "not JSON, and more": f"{call('read', '{path: a}')}\n{SUM}\n{call('read', '{path: of the other one}')}",
    "brace too many": ONE.replace("}}", "}}}"),
    "thought": THOUGHT,
    "thought and call": f"<think>The user wants a file.</think>{ONE}",
    "thought and text": "<think>Two and two are four, as all who count know.</think>It is four, as far as I know.",
}


@pytest.mark.parametrize("question", ANSWERS)
async def test_the_message_is_chats_own(question: str) -> None:
    """Whatever the draft is worth; the calls' arguments byte for byte."""
    async with opened(MessageServer(dict(ANSWERS), reasons=True), taught_by=("thought",)) as target:
        plain = await answer_plain(target, ask(question))
        for text in (ANSWERS[question], ANSWERS[question].replace("path", "file"), "nothing of the kind"):
            result = await answer(target, "race", ReferenceDraft(text), ask(question))
            assert (message(result), result.fallbacks) == (message(plain), ())
            assert result.strategy == "race"
            if text == ANSWERS[question] and question == "long":
                assert result.stats.num_accepted_draft_tokens > 20


async def test_what_is_streamed_is_the_message() -> None:
    """Piece by piece, text before a call, each call with one id; finish reason and usage are chat's own."""
    async with opened(MessageServer(dict(ANSWERS))) as target:
        plain = await answer_plain(target, ask("two"))
        decoder = speculate(target, "race", ReferenceDraft(TWO))
        pieces = Counter[str]()
        ids: dict[int, set[str]] = {0: set(), 1: set()}
        content, arguments = "", {0: "", 1: ""}
        finish: SpeculativeFinish | None = None
        async with decoder.stream(ask("two")) as events:
            async for event in events:
                pieces[type(event).__name__] += 1
                if isinstance(event, TextDelta):
                    assert not any(arguments.values())
                    content += event.text
                elif isinstance(event, ToolCallDelta):
                    arguments[event.index] += event.arguments
                    ids[event.index] |= {event.id} if event.id else set()
                elif isinstance(event, SpeculativeFinish):
                    finish = event
        assert (content, tuple(arguments.values())) == (plain.content, tuple(c.arguments for c in plain.tool_calls))
        assert [len(given) for given in ids.values()] == [1, 1]
        assert pieces["TextDelta"] > 1
        assert pieces["ToolCallDelta"] > 3
        assert finish is not None
        assert finish.finish_reason == "tool_calls"
        assert finish.stopped_by == plain.stopped_by == "tool_calls"
        assert finish.result is not None
        assert finish.result.usage is not None
        assert plain.usage is not None
        assert finish.result.usage.answer_tokens == plain.usage.output_tokens


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 37, 60])
async def test_an_answer_that_is_cut(max_tokens: int) -> None:
    """In a mark, a name, an argument: as chat cuts it."""
    async with opened(MessageServer(dict(ANSWERS))) as target:
        request = ask("two", max_tokens=max_tokens)
        plain = await answer_plain(target, request)
        result = await answer(target, "race", ReferenceDraft(TWO), request)
        assert (message(result), result.stopped_by) == (message(plain), plain.stopped_by)
        assert result.usage is not None
        assert result.usage.answer_tokens == max_tokens


async def test_reasoning_without_tools() -> None:
    """A server that takes reasoning out of every answer; before that is known, and after."""
    thought = "<think>Two and two are four, as everybody knows who can count.</think>It is four, as far as I know."
    async with opened(MessageServer({"sum": thought}, reasons=True), taught_by=()) as target:
        request = ask("sum", tools=())
        plain = await answer_plain(target, request)
        assert plain.reasoning.startswith("Two and two")
        results = [await answer(target, "race", ReferenceDraft(thought), request) for _ in range(4)]
        assert {message(result) for result in results} == {message(plain)}
        assert results[-1].strategy == "race"
        assert results[-1].stats.num_accepted_draft_tokens > 5
        assert results[-1].fallbacks == ()


DRAW = call("add", json.dumps({"a": [0, 0, 0, "#"] * 6}).replace('"#"', "#"))
LIKELY = 10.6  # of a chi-square with 2 degrees of freedom: one in 200 is above it; every run draws the same


async def chi_square_of_drawn_digits(num_decoders: int = 1) -> float:
    """Of the digits that are drawn in an argument, with a draft that says that each is a 1."""
    async with opened(MessageServer({"one": ONE, "draw": DRAW}, token_s=0.01)) as target:
        draft = ReferenceDraft(DRAW.replace("#", "1"))
        decoders = [speculate(target, "race", draft) for _ in range(num_decoders)]
        request = ask("draw", temperature=1.0, max_tokens=150)
        results = [await decoder.decode(request) for decoder in decoders for _ in range(40)]
    assert sum(result.stats.num_accepted_draft_tokens for result in results) > len(results)
    written = "".join(result.tool_calls[0].arguments for result in results)
    drawn = Counter(re.findall(r"0, 0, 0, (\d)", written))
    num_drawn = drawn.total()
    assert num_drawn > 4 * len(results)
    return sum((drawn[text] - num_drawn * p) ** 2 / (num_drawn * p) for text, p in DRAWN)


async def test_a_sampled_call_has_chats_own_distribution() -> None:
    """Whatever the draft says; the next test shows that it would be seen."""
    assert await chi_square_of_drawn_digits() < LIKELY


@pytest.mark.slow
async def test_a_draft_that_is_preferred_where_it_is_right_is_noticed() -> None:
    """The statistic of one decoder is 7 to 23 with `race`, and may hide it."""
    with planted("race"):
        assert await chi_square_of_drawn_digits(num_decoders=8) > LIKELY


async def test_a_server_that_does_not_read_its_tokens() -> None:
    """Without `--enable-scale-out`: plain, and the reason is told; nothing is asked again for a while."""
    async with opened(MessageServer(dict(ANSWERS), derender_status=403)) as target:
        assert target.capabilities.message_parser is None
        result = await answer(target, "race", ReferenceDraft(TWO), ask("two"))
        assert (result.strategy, result.plain_reason) == ("plain", "target")
        assert "no message parser" in (result.plain_detail or "")
        assert result.fallbacks == ()
        assert message(result) == message(await answer_plain(target, ask("two")))


@pytest.mark.parametrize(
    "server",
    [
        MessageServer(dict(ANSWERS), corrupts=True),
        MessageServer(dict(ANSWERS), corrupts_parts=True),
        MessageServer(dict(ANSWERS), is_constrained=True),
    ],
    ids=["corrupt", "corrupt parts", "constrained"],
)
async def test_a_parser_that_differs_from_chat_is_not_believed(server: MessageServer) -> None:
    """It reads an answer otherwise, or chat's answers are held by a grammar."""
    async with opened(server) as target:
        result = await answer(target, "race", ReferenceDraft(TWO), ask("two"))
        assert (result.strategy, result.plain_reason) == ("plain", "target")


async def test_a_parser_that_loses_what_comes_at_once_is_not_believed() -> None:
    """As vLLM's of OLMo 3: of reasoning and text in one piece it gives the reasoning, and waits for another piece."""
    server = MessageServer(dict(ANSWERS), reasons=True, loses_rest=True)
    async with opened(server, taught_by=("thought and text",)) as target:
        result = await answer(target, "race", ReferenceDraft(THOUGHT), ask("thought"))
        assert (result.strategy, result.plain_reason) == ("plain", "target")


async def test_what_a_parser_loses_later_is_found_at_the_end() -> None:
    """The answer by which it was tried had no text that could be lost. This one is whole; later ones are plain."""
    server = MessageServer(dict(ANSWERS), reasons=True, loses_rest=True)
    async with opened(server, taught_by=("thought and call",)) as target:
        request = ask("thought and text")
        plain = await answer_plain(target, request)
        draft = ReferenceDraft(ANSWERS["thought and text"])
        result = await answer(target, "race", draft, request)
        assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
        assert result.stats.num_accepted_draft_tokens > 0
        after = await answer(target, "race", draft, request)
        assert (message(after), after.plain_reason) == (message(plain), "target")


@pytest.mark.parametrize(
    ("change", "is_by_token"), [({}, False), ({"writes_anew": True}, False), ({"whole_status": 503}, True)]
)
async def test_answers_are_read_token_by_token_only_where_something_may_be_lost(
    change: dict[str, Any], is_by_token: bool
) -> None:
    """Not where the reading without streaming has another layout. Where that fails, the parser is still believed."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server, taught_by=("two",)) as target:
        plain = await answer_plain(target, ask("two"))
        for name, value in change.items():
            setattr(server, name, value)
        before = server.paths["/v1/chat/completions/derender"]
        result = await answer(target, "race", ReferenceDraft(TWO), ask("two"))
        assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
        num_derenders = server.paths["/v1/chat/completions/derender"] - before
        assert (num_derenders > 50) == is_by_token
        assert target.capabilities.message_parser is not None


async def test_answers_without_a_call_teach_nothing() -> None:
    async with opened(MessageServer(dict(ANSWERS)), taught_by=("text", "text")) as target:
        assert target.capabilities.message_parser is None
        result = await answer(target, "race", ReferenceDraft(ONE), ask("one"))
        assert result.plain_reason == "discovery"
        assert (await answer(target, "race", ReferenceDraft(ONE), ask("one"))).strategy == "race"


@pytest.mark.parametrize("flaw", ["lost", "corrupt"])
async def test_a_parser_that_is_lost_midway(flaw: str) -> None:
    """The answer goes on from chat, without a piece twice or lost; said once, and plain from then on."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server) as target:
        plain = await answer_plain(target, ask("both"))
        if flaw == "lost":
            server.num_derenders_left = 1
        else:
            server.corrupts = True
        result = await answer(target, "race", ReferenceDraft(ANSWERS["both"]), ask("both"))
        assert message(result) == message(plain)
        assert len(result.fallbacks) == 1
        after = await answer(target, "race", ReferenceDraft(ANSWERS["both"]), ask("both"))
        assert (message(after), after.plain_reason, after.fallbacks) == (message(plain), "target", ())
        assert server.num_open == 0


@pytest.mark.parametrize("question", ["one", "text", "both"])
async def test_a_draft_that_goes_on_after_the_end(question: str) -> None:
    """What copies from a prompt has the mark that ends an answer in it, and what follows there."""
    rest = f"{END}\nuser and so on, and so on, and so on, as it was before\nand once more, as it was before\n"
    async with opened(MessageServer(dict(ANSWERS))) as target:
        plain = await answer_plain(target, ask(question))
        result = await answer(target, "race", ReferenceDraft(ANSWERS[question] + rest), ask(question))
        assert (message(result), result.fallbacks) == (message(plain), ())


async def test_a_chat_that_tells_several_tokens_at_once() -> None:
    """What it makes of them is told with the last of them; an answer may be ahead of it from any of them on."""
    async with opened(MessageServer(dict(ANSWERS), tokens_per_chunk=3)) as target:
        for question in ("two", "both", "unicode"):
            plain = await answer_plain(target, ask(question))
            result = await answer(target, "race", ReferenceDraft(ANSWERS[question]), ask(question))
            assert (message(result), result.fallbacks) == (message(plain), ())


@pytest.mark.parametrize("num_tokens", [*range(1, 20), 200])
async def test_events_are_those_of_the_confirmed_tokens(num_tokens: int) -> None:
    """A strategy that ends after so many of chat's tokens, by a stream that knows nothing of calls."""

    async def confirm(endpoint: TokenEndpoint, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        ids = await read_chat_ids(endpoint, request)
        yield TextDelta("", "plain", tuple(ids[:num_tokens]))
        yield Finish("stop" if num_tokens >= len(ids) else "length")

    async with opened(MessageServer(dict(ANSWERS), tokens_per_chunk=3)) as target:
        builder = ChatResponseBuilder()
        *_, response = [builder.add_event(event) for event in await confirm_tokens(target, ask("two"), confirm)]
        limit = num_tokens if num_tokens < 20 else None
        own = await answer_plain(target, ask("two", max_tokens=limit))
        assert response is not None
        assert (response.message.text, response.finish_reason) == (own.content, own.finish_reason)
        assert [made.arguments for made in response.message.tool_calls] == [made.arguments for made in own.tool_calls]


@pytest.mark.parametrize("num_tokens", range(1, 7))
async def test_the_parser_goes_on_within_a_piece_of_chats(num_tokens: int) -> None:
    """A strategy that confirms so many tokens of chat's, which tells three at once, and goes on by itself."""
    server = MessageServer(dict(ANSWERS), tokens_per_chunk=3)

    async def confirm(endpoint: TokenEndpoint, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        await read_chat_ids(endpoint, request, at_least=6)
        ids = server.encode(ANSWERS["two"])
        yield TextDelta("", "plain", tuple(ids[:num_tokens]))
        await asyncio.sleep(0.05)
        yield TextDelta("", "accepted", tuple(ids[num_tokens:]))
        yield Finish("stop")

    async with opened(server) as target:
        given = await confirm_tokens(target, ask("two"), confirm)
        assert not [event for event in given if isinstance(event, Fallback)]
        own = await answer_plain(target, ask("two"))
        assert "".join(event.text for event in given if isinstance(event, TextDelta)) == own.content
        arguments = "".join(event.arguments for event in given if isinstance(event, ToolCallDelta))
        assert arguments == "".join(made.arguments for made in own.tool_calls)


async def test_what_was_confirmed_before_an_error_is_given() -> None:
    async def confirm(endpoint: TokenEndpoint, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        ids = await read_chat_ids(endpoint, request)
        yield TextDelta("", "plain", tuple(ids[:6]))
        raise TransientError("the connection broke")

    async with opened(MessageServer(dict(ANSWERS))) as target:
        given: list[StreamEvent] = []
        with pytest.raises(TransientError, match="broke"):
            await confirm_tokens(target, ask("two"), confirm, given)
        assert "".join(event.text for event in given if isinstance(event, TextDelta)) == "I read both of them,"


@pytest.mark.parametrize("goes_on", [True, False])
async def test_what_came_together_with_the_parsers_failure_is_given(goes_on: bool) -> None:
    """Text that chat wrote, and why the draft failed: neither is lost if the parser is called at once, and fails."""
    server = MessageServer(dict(ANSWERS))

    async def confirm(endpoint: TokenEndpoint, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        ids = await read_chat_ids(endpoint, request)
        yield TextDelta("", "plain", tuple(ids[:6]))
        yield Fallback("the draft is busy")
        if goes_on:
            yield TextDelta("", "accepted", tuple(server.encode(" other")))
        yield Finish("length")

    async with opened(server) as target:
        own = await answer_plain(target, ask("two"))
        server.num_derenders_left = 0
        given = await confirm_tokens(target, ask("two"), confirm)
        assert "".join(event.text for event in given if isinstance(event, TextDelta)) == own.content
        failure, other_failure = [event.reason for event in given if isinstance(event, Fallback)]
        assert failure == "the draft is busy" != other_failure


Confirm = Callable[[TokenEndpoint, ChatRequest], AsyncGenerator[StreamEvent]]


async def confirm_tokens(
    target: HttpProvider, request: ChatRequest, confirm: Confirm, given: list[StreamEvent] | None = None
) -> list[StreamEvent]:
    """The events of the tokens that a strategy confirms."""

    @asynccontextmanager
    async def run(context: StrategyContext) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        endpoint = context.target.capabilities.token_endpoint
        assert endpoint is not None
        yield confirm(endpoint, context.request)

    def prepare(context: StrategyContext) -> ReadyStrategy:
        return ReadyStrategy(TextGuarantee("exact", same_text=False), lambda: run(context))

    context = StrategyContext(
        draft=ReferenceDraft("x"),
        target=target,
        request=request,
        limits=SpeculativeConfig(),
        pair_stats=Patient(),
    )
    prepared = prepare_with_message_parser(prepare, context)
    assert isinstance(prepared, ReadyStrategy)
    given = [] if given is None else given
    async with prepared.run() as events:
        async for event in events:
            given.append(event)
    return given


async def read_chat_ids(endpoint: TokenEndpoint, request: ChatRequest, at_least: int = 10_000) -> list[int]:
    """The tokens of chat's own stream, up to so many, without that of its end."""
    ids: list[int] = []
    async with endpoint.stream_chat(request) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.text:
                ids += event.token_ids or ()
            if len(ids) >= at_least:
                break
    return ids


async def test_no_answer_fails_for_the_text_of_its_tokens() -> None:
    """Only drafts need it."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server) as target:
        server.detokenize_status = 500
        result = await answer(target, "race", ReferenceDraft("nothing of the kind"), ask("unicode"))
        assert message(result) == message(await answer_plain(target, ask("unicode")))
        assert not result.retries


async def test_what_was_sampled_and_shown_is_not_written_anew() -> None:
    """A parser that is lost within a sampled answer ends it; an answer of which nothing was shown begins anew."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server) as target:
        request = ask("both", temperature=1.0)
        server.num_derenders_left = 1
        with pytest.raises(TransientError, match="does not read its own answer"):
            await stream_to_end(speculate(target, "race", ReferenceDraft(ANSWERS["both"])), request)
    server = MessageServer(dict(ANSWERS))
    async with opened(server) as target:
        server.num_derenders_left = 1
        result = await answer(target, "race", ReferenceDraft(ANSWERS["both"]), request)
        assert message(result) == message(await answer_plain(target, request))
        assert len(result.retries) == 1


async def test_leaving_in_the_middle_of_a_call_closes_everything() -> None:
    server = MessageServer(dict(ANSWERS), token_s=0.01)
    async with opened(server) as target:
        before = asyncio.all_tasks()
        decoder = speculate(target, "race", ReferenceDraft(ANSWERS["long"]))
        async with decoder.stream(ask("long")) as events:
            async for event in events:
                if isinstance(event, ToolCallDelta) and event.arguments:
                    break
        await asyncio.sleep(0.05)
        assert server.num_open == 0
        assert {task for task in asyncio.all_tasks() - before if not _is_of_server(task)} == set()


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"]},
        {"extra": {"parallel_tool_calls": False}},
    ],
)
async def test_what_a_server_holds_to_a_form_stays_plain(options: dict[str, Any]) -> None:
    request = ask("two", **options)
    async with opened(MessageServer(dict(ANSWERS))) as target:
        auto = SpeculativeDecoder(target=target, draft=ReferenceDraft(TWO), config=SpeculativeConfig())
        learn_worth(auto, 1.5)
        *_, last = [await auto.decode(request) for _ in range(4)]
        assert (last.strategy, last.plain_reason) == ("plain", "request")


async def test_auto_reads_messages_where_a_race_has_paid() -> None:
    """For text. Before that nothing is tried, nor where it did not pay."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server, taught_by=()) as target:
        auto = SpeculativeDecoder(target=target, draft=ReferenceDraft(TWO), config=SpeculativeConfig(baseline_every=0))
        plain = message(await answer_plain(target, ask("two")))
        for value_ratio, reason in ((None, "not_measured"), (0.9, "not_worthwhile")):
            if value_ratio is not None:
                learn_worth(auto, value_ratio)
            *_, last = [await auto.decode(ask("two")) for _ in range(3)]
            assert (message(last), last.strategy, last.plain_reason) == (plain, "plain", reason)
        assert server.paths["/v1/chat/completions/derender"] == 0
        learn_worth(auto, 1.5)
        results = [await auto.decode(ask("two")) for _ in range(3)]
        assert {message(result) for result in results} == {plain}
        assert [result.strategy for result in results] == ["plain", "race", "race"]
        assert results[0].plain_reason == "discovery"


@pytest.mark.parametrize("strategy", ["probe", "score"])
async def test_other_strategies_read_no_messages(strategy: str) -> None:
    async with opened(MessageServer(dict(ANSWERS))) as target:
        plain = await answer_plain(target, ask("two"))
        result = await answer(target, strategy, ReferenceDraft(TWO), ask("two"))
        assert (message(result), result.strategy, result.plain_reason) == (message(plain), "plain", "request")


async def test_nothing_is_asked_of_a_parser_while_chat_is_ahead() -> None:
    """A draft that is of no use costs the server no reading of its own answer."""
    server = MessageServer(dict(ANSWERS))
    async with opened(server) as target:
        server.paths.clear()
        await answer(target, "race", ReferenceDraft("nothing of the kind"), ask("two"))
        assert server.paths["/v1/chat/completions/derender"] == 0


async def stream_to_end(decoder: SpeculativeDecoder, request: ChatRequest) -> None:
    async with decoder.stream(request) as events:
        async for _ in events:
            pass


def _is_of_server(task: asyncio.Task[Any]) -> bool:
    return "RequestHandler" in repr(task)


@pytest.mark.parametrize(
    ("arguments", "is_broken"),
    [
        ('{"a": 1}', False),
        ('\n {"a": 1} \n', False),
        ('{"a": 1}}', True),
        ('{"a": src}', True),
        ('{"a": ' + 10_000 * "[", True),  # deeper than any reader goes
    ],
)
def test_a_call_is_broken_whose_arguments_are_not_one_json_value(arguments: str, *, is_broken: bool) -> None:
    message = ParsedMessage(tool_calls=(ToolCall("1", "read", arguments),))
    assert _has_broken_call(message, is_whole=True) == is_broken
