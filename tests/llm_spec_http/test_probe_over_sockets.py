"""Probing a real server on loopback: the same text, what it costs there, what breaks there, and nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Literal

import pytest
from aiohttp import web
from llm_spec_http import DIALECTS, HttpProvider
from support.probing import patient

from llm_spec import (
    ChatRequest,
    Fixed,
    PromptLookup,
    ReferenceDraft,
    Round,
    SpeculativeDecoder,
    SpeculativeResult,
    TargetError,
    TextDelta,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.testing.server import ScriptedModelServer, ServerFaults, ServerLatency, make_disagreeing_draft
from llm_spec.testing.simulated import SimulatedDraft

pytestmark = pytest.mark.virtual_clock

WORDS = " ".join(f"word{i}" for i in range(60))
VARIED = (
    "Plan for   the reader.\r\n\r\n```python title here\ndef f(x):\n    return x  # naïve\n```\n\n"
    "日本語 の 文章 も 😀 👩‍👩‍👧 text with runs\t\tof \n \n whitespace  \n\n\nand the end of it all \n"
)
QUICK = ServerLatency(first_token_s=0.004, token_s=0.001)
QUESTION = "Tell me."


@asynccontextmanager
async def opened(server: ScriptedModelServer) -> AsyncGenerator[HttpProvider]:
    provider = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
    try:
        await provider.discover("token_endpoint")
        server.requests.clear()
        server.paths.clear()
        server.num_cancelled = server.num_generated_tokens = 0
        yield provider
    finally:
        await provider.aclose()


def agreeing(answer: str = WORDS, agreement: float = 1.0, token_s: float = 0.0002) -> DraftProvider:
    return SimulatedDraft(answer, agreement, 1, token_s=token_s)


async def probed(
    server: ScriptedModelServer, draft: DraftProvider, request: ChatRequest | str = QUESTION, **options: Any
) -> SpeculativeResult:
    async with opened(server) as target:
        return await patient(draft, target, **options).decode(request)


async def none_open(server: ScriptedModelServer) -> bool:
    """Whether the server sees within 50 ms that nobody waits for it any more."""
    end_s = asyncio.get_running_loop().time() + 0.05
    while server.num_open_streams and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - it tells no news
        await asyncio.sleep(0.002)
    return server.num_open_streams == 0


@pytest.mark.parametrize("answer", [WORDS, VARIED])
@pytest.mark.parametrize("kind", ["agreeing", "half", "useless", "lookup", "given"])
async def test_the_text_is_the_targets_own(answer: str, kind: str) -> None:
    """Byte for byte, whatever the draft is worth, with one fallback at most and nothing left open."""
    drafts: dict[str, DraftProvider] = {
        "agreeing": agreeing(answer),
        "half": agreeing(answer, 0.6),
        "useless": ReferenceDraft("nothing of the kind"),
        "lookup": PromptLookup(),
        "given": ReferenceDraft(make_disagreeing_draft(answer, 0.8, 2)),
    }
    async with ScriptedModelServer(answer, latency=QUICK) as server:
        result = await probed(server, drafts[kind])
        assert (result.content, result.finish_reason, result.fallbacks) == (answer, "stop", ())
        assert await none_open(server)


async def test_a_cap_and_a_stop_string_end_it_as_they_end_the_plain_answer() -> None:
    """The stop string is matched here and never sent with a round."""
    async with ScriptedModelServer(WORDS, latency=QUICK) as server:
        result = await probed(server, agreeing(), ChatRequest.create(QUESTION, max_tokens=7))
        assert (result.content, result.stopped_by) == ("".join(split_into_pieces(WORDS)[:7]), "max_tokens")
        result = await probed(server, agreeing(), ChatRequest.create(QUESTION, stop=["d17 w"]))
        assert (result.content, result.stopped_by) == (WORDS[: WORDS.index("d17 w")], "stop_string")
        assert not any("stop" in body for body in server.requests)


async def test_a_round_is_one_request_of_growing_prefixes() -> None:
    """Each asks for one token after lookahead + 1 prefixes at most, without a seed."""
    async with ScriptedModelServer(WORDS, latency=QUICK) as server:
        request = ChatRequest.create(QUESTION, temperature=0.7, top_p=0.9)
        result = await probed(server, agreeing(), request, lookahead=Fixed(5), max_concurrent_streams=3)
        assert result.content == WORDS
        rounds = [body for body in server.requests if not body.get("stream")]
        assert rounds
        for body in rounds:
            assert (body["max_tokens"], body["temperature"], body["top_p"]) == (1, 0.7, 0.9)
            assert "seed" not in body
            assert 1 <= len(body["prompt"]) <= 6
            assert all(b[:-1] == a for a, b in pairwise(body["prompt"]))
        assert max(len(body["prompt"]) for body in rounds) > 1


# ------------------------------------------------------------------------------------------ faults


class Faulty(ScriptedModelServer):
    """Answers rounds wrongly from a number of text requests on."""

    mode: Literal["drop", "choices", "no_ids", "no_json"] | None = None
    from_request = 0

    async def _respond_with_answers(
        self, request: web.Request, body: Any, kind: Any, answers: Sequence[Any], faults: ServerFaults
    ) -> web.StreamResponse:
        if self.mode is None or body.get("stream") or len(self.requests) <= self.from_request:
            return await super()._respond_with_answers(request, body, kind, answers, faults)
        if self.mode == "drop" and request.transport is not None:
            request.transport.abort()
        if self.mode == "no_json":
            return web.Response(text="<html>busy</html>")
        if self.mode == "choices":
            answers = [*answers, answers[0]]
        return await super()._respond_with_answers(request, body | {"return_token_ids": False}, kind, answers, faults)


@pytest.mark.parametrize("mode", ["drop", "choices", "no_ids", "no_json"])
@pytest.mark.parametrize("at", [0, 1, 5])
async def test_a_server_that_answers_rounds_wrongly_is_asked_plainly(mode: Any, at: int) -> None:
    """Nothing twice, nothing lost, one fallback; the rest is one stream after the confirmed tokens."""
    async with Faulty(WORDS, latency=QUICK) as server, opened(server) as target:
        server.mode, server.from_request = mode, at
        result = await patient(agreeing(), target, lookahead=Fixed(3)).decode(QUESTION)
        assert (result.content, result.finish_reason) == (WORDS, "stop")
        assert len(result.fallbacks) == 1
        assert sum(bool(body.get("stream")) for body in server.requests) <= 2  # a new one where rounds had overtaken it
        assert await none_open(server)


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("continues", [False, True])
async def test_one_refused_request_costs_no_text(status: int, continues: bool) -> None:
    """The next ones are served: the answer is whole."""
    async with ScriptedModelServer(WORDS, latency=QUICK, continues_prefix="fields" if continues else None) as server:
        result, shown = await spoiled(server, ServerFaults(status=status, num_requests=1 << 30), after=6, heals=True)
        assert shown == WORDS
        assert result is not None
        assert len(result.fallbacks) == 1


async def spoiled(
    server: ScriptedModelServer, faults: ServerFaults, *, after: int, heals: bool = False
) -> tuple[SpeculativeResult | None, str]:
    """The server breaks when so many pieces are shown (heals: until the fallback); what was shown in the end."""
    shown, num_shown = "", 0
    result: SpeculativeResult | None = None
    async with opened(server) as target:
        decoder = patient(agreeing(), target, lookahead=Fixed(2), max_concurrent_streams=2)
        async with decoder.stream(QUESTION, rounds=True) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    shown, num_shown = shown + event.text, num_shown + 1
                if num_shown == after:
                    server.faults = faults
                if type(event).__name__ == "Fallback" and heals:
                    server.faults = ServerFaults()
                result = getattr(event, "result", result)
    return result, shown


async def test_a_server_that_refuses_everything_midway_is_an_error_with_the_text_so_far() -> None:
    """Neither rounds, nor ids, nor text go on: TargetError, whose partial text is what was shown."""
    async with ScriptedModelServer(WORDS, latency=QUICK, continues_prefix="fields") as server:
        with pytest.raises(TargetError) as caught:
            await spoiled(server, ServerFaults(status=500), after=8)
        text = caught.value.partial_text
        assert WORDS.startswith(text)
        assert len(split_into_pieces(text)) >= 8
        assert "500" in str(caught.value)
        assert await none_open(server)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/detokenize"])
async def test_a_server_that_loses_a_path_midway_goes_on(path: str) -> None:
    """What it does not know any more is not needed for the rest; the next request is plain, and says why."""
    async with ScriptedModelServer(WORDS, latency=QUICK, continues_prefix="fields") as server, opened(server) as target:
        decoder = patient(ReferenceDraft(make_disagreeing_draft(WORDS, 0.7, 3)), target, lookahead=Fixed(3))
        shown, num_fallbacks = "", 0
        async with decoder.stream(QUESTION, rounds=True) as events:
            async for event in events:
                shown += event.text if isinstance(event, TextDelta) else ""
                num_fallbacks += type(event).__name__ == "Fallback"
                if isinstance(event, Round) and event.index == 1:
                    server.faults = ServerFaults(missing=frozenset({path}))
        assert shown == WORDS
        if path == "/v1/completions":
            assert num_fallbacks == 1
            _, plain = [await decoder.decode(QUESTION) for _ in range(2)]  # the first one gives the baseline
            assert (plain.content, plain.plain_reason) == (WORDS, "target")
        server.paths.clear()
        auto = await SpeculativeDecoder(target=target, draft=agreeing()).decode(QUESTION)
        assert auto.content == WORDS


class NoTokens(ScriptedModelServer):
    """`/tokenize` answers a text with something else from a number of calls on."""

    num_left = 1 << 30

    async def _handle_tokenize(self, request: web.Request) -> web.Response:
        self.num_left -= 1
        return web.json_response({"detail": "busy"}) if self.num_left < 0 else await super()._handle_tokenize(request)


@pytest.mark.parametrize("num_left", [0, 1, 2])
async def test_an_answer_of_another_form_to_tokenize_costs_no_text(num_left: int) -> None:
    """A server that answers 200 without ids has failed too: the target goes on alone.

    The prompt is encoded first, then the draft, then what is left of it behind the first token that differs.
    """
    draft = ReferenceDraft(make_disagreeing_draft(WORDS, 0.7, 3))
    async with NoTokens(WORDS, latency=QUICK) as server, opened(server) as target:
        server.num_left = num_left
        result = await patient(draft, target, lookahead=Fixed(2)).decode(QUESTION)
        assert result.content == WORDS
        assert len(result.fallbacks) == 1


async def test_the_context_length_is_kept_to() -> None:
    """The answer ends where the context does; no request asks for more than there is room for."""
    async with ScriptedModelServer(WORDS, latency=QUICK, context_length=30) as server:
        result = await probed(server, agreeing(), lookahead=Fixed(4))
        assert (result.finish_reason, result.stopped_by) == ("length", "context_length")
        assert WORDS.startswith(result.content)
        assert result.usage is not None
        rounds = [body for body in server.requests if "messages" not in body]
        for body in rounds:
            assert max(map(len, body["prompt"])) + body["max_tokens"] <= 30
        assert any(len(prefix) == 29 for body in rounds for prefix in body["prompt"])


async def test_the_costs_are_those_of_the_server() -> None:
    """Tokens read and written by all rounds, as the server's log of requests has them."""
    async with ScriptedModelServer(WORDS, latency=QUICK) as server:
        request = ChatRequest.create(QUESTION, max_tokens=50)
        result = await probed(server, agreeing(WORDS, 0.8), request, lookahead=Fixed(3), max_concurrent_streams=1)
        usage = result.usage
        assert usage is not None
        assert usage.output_tokens == server.num_generated_tokens
        rounds = [body for body in server.requests if "messages" not in body]
        num_prompt = min(len(body["prompt"][0]) for body in rounds)
        num_streams = len(server.requests) - len(rounds)  # each has read the prompt, too
        num_read = sum(len(prefix) for body in rounds for prefix in body["prompt"])
        assert usage.input_tokens == num_read + num_streams * num_prompt
        assert usage.output_tokens - usage.cancelled_output_tokens == 50
        assert usage.input_tokens - usage.extra_input_tokens == num_prompt


# ------------------------------------------------------------------------------------------ leaving


SLOW = ServerLatency(first_token_s=0.08, token_s=0.01)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.02, 0.05, 0.1, 0.13, 0.2])
async def test_cancelling_closes_every_connection(after_s: float) -> None:
    """Within 50 ms the server sees that all rounds have been left."""
    async with ScriptedModelServer(WORDS, latency=SLOW) as server, opened(server) as target:
        before = asyncio.all_tasks()
        decoder = patient(agreeing(token_s=0.005), target, lookahead=Fixed(3))
        task = asyncio.create_task(decoder.decode(QUESTION))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await none_open(server)
        await asyncio.sleep(0.01)
        left = [task for task in asyncio.all_tasks() - before if "RequestHandler" not in repr(task)]  # the server's own
        assert left == []


async def test_rounds_behind_a_rejection_are_left_at_once() -> None:
    """Their connections are closed when the difference is known: the server sees them go before it has answered."""
    draft = SimulatedDraft(WORDS.replace("word2 ", "wordX "), 1.0, 0, token_s=0.01)
    async with ScriptedModelServer(WORDS, latency=ServerLatency(first_token_s=0.1)) as server, opened(server) as target:
        decoder = patient(draft, target, lookahead=Fixed(2), max_concurrent_streams=4)
        async with decoder.stream(QUESTION, rounds=True) as events:
            async for event in events:
                if isinstance(event, Round) and event.rejection_index is not None:
                    break
            await asyncio.sleep(0.03)
            assert server.num_cancelled > 0
        assert await none_open(server)


async def test_a_deadline_leaves_the_server() -> None:
    """The text so far, and nothing open behind it."""
    answer = " ".join(f"word{i}" for i in range(1_000))  # many times what any machine answers within the deadline
    async with ScriptedModelServer(answer, latency=SLOW) as server:
        result = await probed(server, agreeing(answer), lookahead=Fixed(2), deadline_s=1.0)
        assert result.stopped_by == "deadline"
        assert answer.startswith(result.content)
        assert result.content
        assert await none_open(server)
