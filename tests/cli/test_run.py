"""`llm-spec run` at a server: it asks and times the server first, and what it says about speed is true."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from llm_spec_http import DIALECTS, HttpProvider

from llm_spec import ChatRequest, LlmProvider, SpeculativeConfig, SpeculativeDecoder
from llm_spec.cli.answer_figures import WHAT_TO_DO, ComparedAnswer
from llm_spec.cli.main import main
from llm_spec.cli.run import answer_beside_plain
from llm_spec.cli.screen import AnswerScreen
from llm_spec.decoder.result import PLAIN_REASONS
from llm_spec.testing import run_virtual
from llm_spec.testing.server import ScriptedModelServer, ServerLatency
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

WORDS = " ".join(f"word{index}" for index in range(100))
LONG_PROMPT = " ".join(f"note{index}" for index in range(2000))
SLOW: dict[str, Any] = {"first_token_s": 0.45, "token_s": 1 / 60}  # tokens of which several streams write more
NEAR: dict[str, Any] = {"first_token_s": 0.025, "token_s": 0.025, "round_trip_s": 0.02}  # calls that cost little


@asynccontextmanager
async def open_target(kind: str, **latency: Any) -> AsyncGenerator[LlmProvider]:
    if kind == "simulated":
        yield SimulatedTarget(WORDS, by_ids=True, **latency)
        return
    # the first to send the long prompt waits 2 s until it is read
    async with ScriptedModelServer(WORDS, latency=ServerLatency(prefill_tokens_per_s=1000.0, **latency)) as server:
        target = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["vllm"])
        try:
            yield target
        finally:
            await target.aclose()


async def answer_and_compare(target: LlmProvider, strategy: str, agreement: float) -> ComparedAnswer:
    draft = SimulatedDraft(WORDS, agreement, 1)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy=strategy))
    request, screen = ChatRequest.create(LONG_PROMPT, temperature=0.0), AnswerScreen(io.StringIO(), silent=True)
    return await answer_beside_plain(decoder, request, screen, compares=True, has_figures=True)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("kind", ["simulated", "http"])
@pytest.mark.parametrize("agreement", [0.0, 0.8, 0.9, 0.95, 1.0])
@pytest.mark.parametrize(("strategy", "latency"), [("race", SLOW), ("race", NEAR), ("probe", NEAR), ("auto", SLOW)])
async def test_the_reported_speedup_is_the_clocks(
    strategy: str, latency: dict[str, Any], agreement: float, kind: str
) -> None:
    """Within 5 %, of the first answer at a server of which nothing was known; with a good draft it is a gain."""
    async with open_target(kind, **latency) as target:
        answer = await answer_and_compare(target, strategy, agreement)
    assert answer.is_same_text
    assert answer.result.speedup is not None
    assert answer.clock_speedup is not None
    assert answer.result.speedup / answer.clock_speedup == pytest.approx(1.0, abs=0.05)
    if agreement == 1.0:
        assert answer.result.plain_reason is None
        assert answer.clock_speedup > 1.3


async def test_the_target_alone_is_given_no_prediction() -> None:
    """The probable answer that comes with a request would be its draft."""
    text = "def test_spawnl(self):"
    request = ChatRequest.create(text, prediction=text, max_tokens=8, temperature=0.0)
    async with SpeculativeDecoder(target="builtin:target", draft="lookup") as decoder:
        screen = AnswerScreen(io.StringIO(), silent=True)
        answer = await answer_beside_plain(decoder, request, screen, compares=True, has_figures=True)
    assert answer.plain is not None
    assert (answer.result.strategy, answer.plain.strategy) == ("tokens", "plain")


async def test_a_server_that_takes_predictions_is_timed_without_one() -> None:
    """Only the answer that is shown goes with it."""
    request = ChatRequest.create("Tell.", prediction=WORDS, temperature=0.0)
    async with ScriptedModelServer(WORDS) as server:
        target = HttpProvider("scripted", base_url=server.url, dialect=DIALECTS["fireworks"], api_key="none")
        config, screen = SpeculativeConfig(strategy="predict"), AnswerScreen(io.StringIO(), silent=True)
        async with SpeculativeDecoder(target=target, draft="lookup", config=config) as decoder:
            await answer_beside_plain(decoder, request, screen, compares=True, has_figures=True)
        await target.aclose()
    assert [body.get("prediction") is not None for body in server.requests] == [False, False, True]


# ------------------------------------------------------------------------------------------ the command


ANSWER = " ".join(f"word{index}" for index in range(30))


async def run_at_server(
    capsys: pytest.CaptureFixture[str], *arguments: str, prompt: str = "Tell."
) -> tuple[str, str, ScriptedModelServer]:
    """What is written to standard output and standard error, and the server with what it was sent."""
    async with ScriptedModelServer(ANSWER, latency=ServerLatency(token_s=0.001)) as server:
        target = ["run", prompt, "--target", f"vllm:any@{server.url}", "--draft", "lookup"]
        code = await asyncio.to_thread(main, [*target, *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err, server


async def test_a_comparison_says_what_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """One line that the server was asked, one that it was timed; then why nothing was speculated, and what to do."""
    out, err, server = await run_at_server(capsys, "--compare", "--strategy", "race")
    assert out == ANSWER
    asked, timed, _, summary, reason, advice, alone = err.splitlines()
    assert re.fullmatch(r"llm-spec: found out what vllm:any can do \(\d+\.\d\d s\)", asked)
    assert re.fullmatch(r"llm-spec: timed vllm:any alone, with the prompt read before: 30 tokens in \d\.\d{3} s", timed)
    assert re.fullmatch(r"race \(exact\): \d+ tokens in 1 plain step, \d\.\d{3} s", summary)
    assert reason == f"no speculation: {PLAIN_REASONS['nothing_drafted']}"
    assert advice == f"what to do: {WHAT_TO_DO['nothing_drafted']}"
    ratio = r"which is \d+\.\d\dx by the clock \(one run of each\)"
    assert re.fullmatch(rf"the target alone: 30 tokens in \d\.\d{{3}} s, {ratio}; the same text", alone)
    assert {body["temperature"] for body in server.requests} == {0.0}


async def test_a_pipe_gets_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody sees figures, so none are measured, and the server's own sampling holds."""
    out, err, server = await run_at_server(capsys)
    assert (out, err) == (ANSWER, "")
    (body,) = server.requests
    assert body.get("temperature") is None


async def test_json_has_both_speedups(capsys: pytest.CaptureFixture[str]) -> None:
    """The library's own and the clock's."""
    out, _, _ = await run_at_server(capsys, "--compare", "--json", prompt=f"Repeat: {ANSWER}")
    report = json.loads(out)
    assert report["same_text_as_plain"] is True
    assert report["clock_speedup"] == pytest.approx(report["plain_clock_s"] / report["timings"]["total_s"])
    assert "clock" not in (report["speedup_basis"] or "")


async def test_without_a_draft_nothing_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _, err, server = await run_at_server(capsys, "--no-speculation", "--json")
    assert err == ""
    assert len(server.requests) == 1


# ------------------------------------------------------------------------------------------ the figures


@pytest.fixture(scope="module")
def compared() -> ComparedAnswer:
    """Faster than the target alone by half."""
    return run_virtual(answer_and_compare(SimulatedTarget(WORDS, by_ids=True, **NEAR), "race", 0.9))


def change_plain(answer: ComparedAnswer, **values: Any) -> ComparedAnswer:
    assert answer.plain is not None
    return replace(answer, plain=replace(answer.plain, **values))


def change_result(answer: ComparedAnswer, **values: Any) -> ComparedAnswer:
    return replace(answer, result=replace(answer.result, **values))


def test_both_speedups_are_shown(compared: ComparedAnswer) -> None:
    """The library's range, then the clock's, which is in it."""
    *_, reported, alone = compared.describe().splitlines()
    assert reported == "1.39x to 1.84x as fast as the target alone (measured on 2 of its own answers)"
    assert alone == (
        "the target alone: 100 tokens in 2.520 s, which is 1.60x by the clock (one run of each); the same text"
    )


def test_answers_of_different_lengths_are_not_compared(compared: ComparedAnswer) -> None:
    """A short answer is no speedup; one of as many tokens is comparable, whatever it says."""
    assert compared.plain is not None
    assert compared.plain.usage is not None
    other = change_plain(compared, content="other")
    assert other.clock_speedup == compared.clock_speedup
    assert other.describe().endswith("(one run of each); a different text")
    short = change_plain(compared, content="other", usage=replace(compared.plain.usage, output_tokens=9))
    assert short.clock_speedup is None
    assert short.describe().endswith("; a different text of another length, so the times do not compare")
    assert short.to_dict()["clock_speedup"] is None


def test_the_clock_speaks_if_the_library_has_no_figure(compared: ComparedAnswer) -> None:
    """Once, and no line sends people to the command that they have just typed."""
    answer = change_result(compared, plain_s=None, plain_range_s=None)
    *_, reported, alone = answer.describe().splitlines()
    assert reported == "1.60x as fast as the target alone (by the clock, one run of each)"
    assert alone == "the target alone: 100 tokens in 2.520 s; the same text"


def test_without_speculation_the_clock_still_speaks(compared: ComparedAnswer) -> None:
    """What was tried in vain may have cost time."""
    answer = change_result(compared, plain_reason="not_verified")
    assert "which is 1.60x by the clock (one run of each)" in answer.describe()
    assert f"what to do: {WHAT_TO_DO['not_verified']}" in answer.describe()
    assert answer.to_dict()["what_to_do"] == WHAT_TO_DO["not_verified"]


def test_alone(compared: ComparedAnswer) -> None:
    """Without a plain answer there is nothing to compare, in words and in JSON."""
    answer = replace(compared, plain=None)
    assert (answer.is_same_text, answer.clock_speedup) == (None, None)
    assert answer.describe() == compared.result.summary()
    assert answer.to_dict() == compared.result.to_dict() | {"what_to_do": None}


def test_every_reason_has_a_remedy() -> None:
    """But those that the user chose."""
    assert WHAT_TO_DO.keys() == PLAIN_REASONS.keys() - {"configured", "no_draft"}
