"""Answers that a server holds to a form, speculated as far as its constraint has not begun, and equal to its chat's."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.message_answers import answer, answer_plain, ask, learn_worth, message, opened, speculate
from support.message_server import DRAWN, MessageServer, call
from support.planted_faults import planted
from support.probing import TextDraft

from llm_spec import ChatRequest, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, UnsupportedError
from llm_spec.contract.draft import DraftPiece
from llm_spec.strategies import message_answer

pytestmark = pytest.mark.virtual_clock

STRICT = [{"type": "function", "function": {"name": "read", "strict": True, "parameters": {"type": "object"}}}]
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}
WORDS = "I look at the file that the user has named, as far as I can see which of them all is meant by it, " * 3
HELD = call("read", json.dumps({"lines": [7] * 20}))
ANSWERS = {
    "one": call("read", '{"lines": [7, 7]}'),
    "calls": f"{WORDS}so I do.\n{call('read', json.dumps({'lines': [1] * 20}))}",
    "long": f"{5 * WORDS}so I do.\n{HELD}",
    "two calls": f"{WORDS}so I do.\n{HELD}\n{call('read', json.dumps({'lines': [3] * 10}))}",
    "mark": f"{WORDS}; 3 < 4 and <tool is no mark, nor is <, {WORDS}and that is all.",
    "thought": f"<think>{WORDS}and so it is.</think>{{'sum': [1, 2, 3, 'and so on, and so on, and so on']}}",
    "thought and call": f"<think>{WORDS}</think>{call('read', '{}')}",
    "thought and strict call": f"<think>So.</think>{WORDS}so I do.\n{call('read', json.dumps({'lines': [1] * 20}))}",
}


def write_as_constrained(text: str) -> str:
    """What the server writes where a constraint holds the calls."""
    begin, opened_call, calls = text.partition("<tool_call>")
    return begin + opened_call + re.sub(r"\d", "7", calls)


@pytest.mark.parametrize("question", ["calls", "two calls", "mark"])
async def test_strict_tools_are_speculated_up_to_the_first_call(question: str) -> None:
    """From there the server's own constraint writes, in the stream that was begun before."""
    async with opened(MessageServer(dict(ANSWERS), constrains=True), taught_by=("one",)) as target:
        request = ask(question, tools=STRICT)
        plain = await answer_plain(target, request)
        written = write_as_constrained(ANSWERS[question])
        assert all(made.arguments in written for made in plain.tool_calls)
        for draft in (written, ANSWERS[question], "nothing of the kind"):
            result = await answer(target, "race", ReferenceDraft(draft), request)
            assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
            if draft == written:
                assert result.stats.num_accepted_draft_tokens > 20


async def test_strict_tools_are_constrained_after_reasoning_too() -> None:
    """Also in streams that begin after its end, which the server then has to find in what it takes for the prompt."""
    server = MessageServer(dict(ANSWERS), constrains=True, reasons=True)
    async with opened(server, taught_by=("thought and call",)) as target:
        request = ask("thought and strict call", tools=STRICT)
        plain = await answer_plain(target, request)
        written = write_as_constrained(ANSWERS["thought and strict call"])
        result = await answer(target, "race", ReferenceDraft(written), request)
        assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
        assert '"lines": [7, 7' in result.tool_calls[0].arguments
        assert result.stats.num_accepted_draft_tokens > 20


class CorrectedDraft(TextDraft):
    """Begins a call where the answer does not yet; where it is to go on with an answer without it, it is right."""

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        wrong = 2 * WORDS + HELD
        is_wrong = wrong.startswith(request.prefix)
        async with (TextDraft(wrong) if is_wrong else super()).draft(request, max_tokens) as pieces:
            yield pieces


async def test_a_call_that_was_drafted_too_early_ends_nothing() -> None:
    """No stream begins within it; when the draft was wrong, others do."""
    server = MessageServer(dict(ANSWERS), constrains=True)
    async with opened(server, taught_by=("one",)) as target:
        request = ask("long", tools=STRICT)
        plain = await answer_plain(target, request)
        result = await answer(target, "race", CorrectedDraft(write_as_constrained(ANSWERS["long"])), request)
        assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
    begun = [server.decode(body["token_ids"]) for body in server.bodies if "output_mode" in body]
    assert any(3 * WORDS in text for text in begun)


async def test_constrained_streams_of_a_sampled_answer_have_seeds_of_their_own() -> None:
    """Streams with one seed would draw the same noise at different places."""
    drawn = ", ".join(["one of them is a #"] * 8)
    server = MessageServer({"one": ANSWERS["one"], "draw": f"{drawn}.\n{HELD}"}, constrains=True, token_s=0.01)
    async with opened(server) as target:
        draft = ReferenceDraft(server.answers["draw"].replace("#", "1"))
        for _ in range(6):
            await answer(target, "race", draft, ask("draw", tools=STRICT, temperature=1.0))
    seeds = [body["sampling_params"]["seed"] for body in server.bodies if "output_mode" in body]
    assert len(seeds) > 3
    assert len(set(seeds)) == len(seeds)


async def test_a_call_from_the_first_token_on_is_not_called_speculated() -> None:
    """Its streams would begin within it: none is sent, and what a draft had right brought nothing."""
    server = MessageServer(dict(ANSWERS, held=HELD), constrains=True)
    async with opened(server) as target:
        request = ask("held", tools=STRICT)
        plain = await answer_plain(target, request)
        server.paths.clear()
        result = await answer(target, "race", ReferenceDraft(HELD), request)
        assert (message(result), result.strategy, result.fallbacks) == (message(plain), "race", ())
        assert (result.stats.num_accepted_draft_tokens, server.paths["/inference/v1/generate"]) == (0, 0)


async def test_a_form_is_speculated_up_to_the_end_of_the_reasoning() -> None:
    server = MessageServer(dict(ANSWERS), constrains=True, reasons=True)
    async with opened(server, taught_by=("thought and call",)) as target:
        request = ask("thought", tools=(), response_format=FORM)
        plain = await answer_plain(target, request)
        assert plain.content.startswith("{")
        draft = ReferenceDraft(ANSWERS["thought"])
        results = [await answer(target, "race", draft, request) for _ in range(3)]
        assert {message(result) for result in results} == {message(plain)}
        assert results[-1].strategy == "race"
        assert results[-1].stats.num_accepted_draft_tokens > 20
        assert results[-1].fallbacks == ()


async def test_a_form_that_holds_the_reasoning_too_stays_plain() -> None:
    """What comes before is then no reasoning: such answers have nothing after it, and teach nothing."""
    answers = dict(ANSWERS, held="<think>{'sum': [1, 2, 3, 'and so on, and so on, and so on, and so on']}")
    async with opened(MessageServer(answers, reasons=True), taught_by=("thought and call",)) as target:
        request = ask("held", tools=(), response_format=FORM)
        results = [await answer(target, "race", ReferenceDraft(answers["held"]), request) for _ in range(3)]
        assert {(result.strategy, result.plain_reason) for result in results} == {("plain", "discovery")}


async def test_a_call_that_must_be_made_is_speculated_in_its_reasoning() -> None:
    server = MessageServer(
        dict(ANSWERS, must=f"<think>{WORDS}</think>{{'name': 'read', 'arguments': {{}}}}"), reasons=True
    )
    server.constrains = True
    async with opened(server, taught_by=("thought and call",)) as target:
        request = ask("must", tools=STRICT, tool_choice="required")
        plain = await answer_plain(target, request)
        results = [await answer(target, "race", ReferenceDraft(server.answers["must"]), request) for _ in range(3)]
        assert {message(result) for result in results} == {message(plain)}
        assert results[-1].strategy == "race"
        assert results[-1].stats.num_accepted_draft_tokens > 20


@pytest.mark.parametrize(
    ("question", "options"), [("calls", {"tools": STRICT}), ("thought", {"response_format": FORM})]
)
async def test_a_stream_that_began_within_a_constraint_would_be_seen(
    question: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault against which the tests above hold: the server starts its constraint anew with each request."""
    is_form = question == "thought"
    server = MessageServer(dict(ANSWERS), constrains=True, reasons=is_form)
    async with opened(server, taught_by=("thought and call",) if is_form else ("one",)) as target:
        request = ask(question, **{"tools": (), **options})
        plain = await answer_plain(target, request)
        draft = ReferenceDraft(write_as_constrained(ANSWERS[question]))
        await answer(target, "race", draft, request)
        assert message(await answer(target, "race", draft, request)) == message(plain)
        monkeypatch.setattr(message_answer._RawEndpoint, "_may_be_constrained_after", never)
        assert message(await answer(target, "race", draft, request)) != message(plain)


async def never(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("text", "has_begun"),
    [
        ("", False),
        ("all of it", False),
        ("a < b", False),
        ("a <", True),
        ("a <tool_cal", True),
        ("a <tool_call> b", True),
        ("<tool_calx", False),
        ("a [", True),
        ("a [CALLS] b", True),
        ("half a character \N{REPLACEMENT CHARACTER}", True),
        ("\N{REPLACEMENT CHARACTER} was one", False),
    ],
)
def test_a_trigger_may_have_begun(text: str, *, has_begun: bool) -> None:
    assert message_answer._may_have_begun(("<tool_call>", "[CALLS]"), text) == has_begun


@pytest.mark.slow
async def test_a_sampled_answer_before_a_strict_call_has_chats_own_distribution() -> None:
    """By chi-square over what is drawn before the call, where the draft says that each is a 1."""
    drawn = ", ".join(["one of them is a #"] * 8)
    server = MessageServer({"one": ANSWERS["one"], "draw": f"{drawn}.\n{HELD}"}, constrains=True, token_s=0.01)

    async def measure() -> float:
        async with opened(server) as target:
            decoder = speculate(target, "race", ReferenceDraft(server.answers["draw"].replace("#", "1")))
            request = ask("draw", tools=STRICT, temperature=1.0, max_tokens=150)
            results = [await decoder.decode(request) for _ in range(60)]
        assert sum(result.stats.num_accepted_draft_tokens for result in results) > len(results)
        counts = Counter(re.findall(r"is a (\d)", "".join(result.content for result in results)))
        total = counts.total()
        assert total == 8 * len(results)
        return sum((counts[text] - total * p) ** 2 / (total * p) for text, p in DRAWN)

    likely = 10.6  # of a chi-square with 2 degrees of freedom: one in 200 is above it; every run draws the same
    assert await measure() < likely
    with planted("race"):
        assert await measure() > likely


@pytest.mark.parametrize("max_tokens", [5, 40, 75, 90, 140])
async def test_an_answer_that_is_cut_is_cut_as_chats(max_tokens: int) -> None:
    async with opened(MessageServer(dict(ANSWERS), constrains=True)) as target:
        request = ask("calls", tools=STRICT, max_tokens=max_tokens)
        plain = await answer_plain(target, request)
        draft = ReferenceDraft(write_as_constrained(ANSWERS["calls"]))
        result = await answer(target, "race", draft, request)
        assert (message(result), result.stopped_by) == (message(plain), plain.stopped_by)
        assert result.usage is not None
        assert result.usage.answer_tokens == max_tokens


@pytest.mark.parametrize("strategy", ["probe", "score"])
async def test_rows_are_refused_where_an_answer_is_constrained(strategy: str) -> None:
    """They write text alone."""
    async with opened(MessageServer(dict(ANSWERS), constrains=True)) as target:
        with pytest.raises(UnsupportedError, match="sets tools"):
            await answer(target, strategy, ReferenceDraft(WORDS), ask("calls", tools=STRICT))


async def test_auto_speculates_with_strict_tools() -> None:
    async with opened(MessageServer(dict(ANSWERS), constrains=True)) as target:
        decoder = SpeculativeDecoder(
            target=target,
            draft=ReferenceDraft(write_as_constrained(ANSWERS["calls"])),
            config=SpeculativeConfig(baseline_every=0),
        )
        plain = await answer_plain(target, ask("calls", tools=STRICT))
        await decoder.decode(ask("calls", tools=STRICT))  # of the target alone
        learn_worth(decoder, 1.5)
        results = [await decoder.decode(ask("calls", tools=STRICT)) for _ in range(6)]
        assert {message(result) for result in results} == {message(plain)}
        assert "race" in {result.strategy for result in results}


async def test_a_server_that_does_not_constrain_is_speculated_within_calls() -> None:
    """It says so itself of each request that sets what others constrain."""
    answers = dict(ANSWERS, free=f"I do.\n{call('read', json.dumps({'lines': list(range(60))}))}")
    async with opened(MessageServer(answers), taught_by=("one",)) as target:
        request = ask("free", tools=STRICT)
        plain = await answer_plain(target, request)
        result = await answer(target, "race", ReferenceDraft(answers["free"]), request)
        assert (message(result), result.strategy) == (message(plain), "race")
        assert result.stats.num_accepted_draft_tokens > 20


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_without_such_streams_answers_alone(status: int) -> None:
    """Nothing is lost; where the call is not there, later ones are plain."""
    server = MessageServer(dict(ANSWERS), constrains=True, generate_status=status)
    async with opened(server) as target:
        request, draft = ask("calls", tools=STRICT), ReferenceDraft(write_as_constrained(ANSWERS["calls"]))
        plain = await answer_plain(target, request)
        result = await answer(target, "race", draft, request)
        assert message(result) == message(plain)
        assert len(result.fallbacks) == 1
        if status == 404:
            after = await answer(target, "race", draft, request)
            assert (message(after), after.plain_reason) == (message(plain), "target")
