"""`predict`: what goes along as a prediction, what is refused, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from llm_spec_http import DIALECTS, HttpProvider
from support.wire import Wire, chunk, text_chunks

from llm_spec import (
    Finish,
    InvalidRequestError,
    Price,
    PromptLookup,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeResult,
    TextDelta,
    UnsupportedError,
    Usage,
)
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual

WORDS = " ".join(f"word{i}" for i in range(40))
PREDICTS = Capabilities(prediction=True)
DEAR = Price(input=2.0, output=8.0)


def target_of(usage: Usage | None = None, **options: Any) -> ScriptedProvider:
    script = [TextDelta(WORDS), Finish("stop", usage)]
    return ScriptedProvider(script, name="a:t", capabilities=PREDICTS, **options)


async def decode(draft: Any, target: Any, config: dict[str, Any] | None = None, **options: Any) -> SpeculativeResult:
    config = {"strategy": "predict", "prices": {"t": DEAR}, **(config or {})}
    return await SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(**config)).decode(
        "q", **options
    )


def predicted(*arguments: Any, **options: Any) -> SpeculativeResult:
    return run_virtual(decode(*arguments, **options))


def test_a_prediction_costs_what_is_rejected() -> None:
    """The provider's own figures, in the result's rounds and its money."""
    usage = Usage(
        input_tokens=10,
        output_tokens=70,
        accepted_prediction_tokens=30,
        rejected_prediction_tokens=20,
        cancelled_output_tokens=20,
    )
    target = target_of(usage)
    result = predicted(ReferenceDraft(WORDS), target)
    assert (result.content, result.guarantee, result.strategy) == (WORDS, "exact", "predict")
    assert target.requests[0].prediction == WORDS
    assert (result.stats.num_draft_tokens, result.stats.num_accepted_draft_tokens) == (50, 30)
    assert result.stats.num_emitted_tokens == 50
    assert result.cost.saving == pytest.approx(-20 * 8e-6)


def test_a_provider_that_does_not_tell_gives_no_figures() -> None:
    """No round is made up."""
    assert predicted(ReferenceDraft(WORDS), target_of(Usage(output_tokens=40))).rounds == ()


@pytest.mark.parametrize("draft", [None, ReferenceDraft("another")])
def test_the_callers_own_prediction_comes_first(draft: Any) -> None:
    target = target_of()
    assert predicted(draft, target, prediction="the file being edited").content == WORDS
    assert target.requests[0].prediction == "the file being edited"


def test_a_model_drafts_the_prediction() -> None:
    """All of it is read before the target is asked; its usage is told."""
    draft, target = ScriptedProvider("a guess", delay_piece_s=0.5), target_of()
    result = predicted(draft, target)
    assert target.requests[0].prediction == "a guess"
    assert result.draft_usage is not None
    assert result.timings.first_text_s is not None
    assert result.timings.first_text_s >= 1.0


@pytest.mark.parametrize(
    ("draft", "sent", "why"),
    [
        (ScriptedProvider("one two three", fail_at={2: RuntimeError("it broke")}), "one two", "it broke"),
        (ScriptedProvider("one two", fail_at={0: RuntimeError("it broke")}), None, "it broke"),
        (ScriptedProvider("one two three", delay_piece_s=6.0), "one two", "late"),
        (ReferenceDraft(""), None, None),
        (PromptLookup(), None, None),
    ],
    ids=["breaks", "fails", "late", "empty", "nothing to copy"],
)
def test_a_draft_that_fails_leaves_what_it_wrote(draft: Any, sent: str | None, why: str | None) -> None:
    """The target answers, with as much of a prediction as there is."""
    target = target_of()
    result = predicted(draft, target, {"draft_timeout_s": 10.0})
    assert (result.content, target.requests[0].prediction) == (WORDS, sent)
    assert len(result.fallbacks) == (why is not None)
    assert why is None or why in result.fallbacks[0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"extra": {"n": 2}}, "n, which"),
        ({"extra": {"logprobs": True}}, "logprobs"),
        ({"extra": {"audio": {"voice": "x"}}}, "audio"),
        ({"extra": {"max_completion_tokens": 9}}, "max_completion_tokens"),
    ],
)
def test_what_does_not_go_with_predictions_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        predicted(ReferenceDraft(WORDS), target_of(), **options)


@pytest.mark.parametrize("options", [{"presence_penalty": -0.5}, {"extra": {"n": 1, "user": "x"}}])
def test_what_does_go_with_predictions(options: dict[str, Any]) -> None:
    assert predicted(ReferenceDraft(WORDS), target_of(), **options).content == WORDS


def test_a_pair_that_cannot() -> None:
    with pytest.raises(UnsupportedError, match="no draft, and the request has no prediction"):
        predicted(None, target_of())
    with pytest.raises(UnsupportedError, match="a:t takes no predicted outputs"):
        predicted(ReferenceDraft(WORDS), ScriptedProvider(WORDS, name="a:t"))


class Refusing(ScriptedProvider):
    """Calls a request with a prediction invalid."""

    def _play_script(self, request: Any) -> Any:
        if request.prediction is not None:
            raise InvalidRequestError("no predictions today")
        return super()._play_script(request)


def test_a_server_that_refuses_the_prediction_answers_without() -> None:
    target = Refusing(WORDS, name="a:t", capabilities=PREDICTS)
    result = predicted(ReferenceDraft("guess"), target)
    assert (result.content, result.fallbacks) == (WORDS, ("InvalidRequestError: no predictions today",))
    assert len(target.requests) == 2


def test_an_invalid_request_stays_one() -> None:
    """The target alone refuses it as well; or something was written."""
    target = ScriptedProvider(WORDS, name="a:t", capabilities=PREDICTS, fail_at={0: InvalidRequestError("too long")})
    with pytest.raises(InvalidRequestError, match="too long"):
        predicted(ReferenceDraft(""), target)
    assert len(target.requests) == 2
    target = ScriptedProvider(WORDS, name="a:t", capabilities=PREDICTS, fail_at={3: InvalidRequestError("too long")})
    with pytest.raises(InvalidRequestError, match="too long"):
        predicted(ReferenceDraft("guess"), target)
    assert len(target.requests) == 1


async def test_on_the_wire() -> None:
    """As a body holds it, and with the usage that comes back."""
    wire, app = Wire(), web.Application()
    app.router.add_post("/v1/chat/completions", wire.answer)
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": details}
    wire.frames = [*text_chunks("a", " b")[:-1], chunk(usage=usage, choices=[]), b"data: [DONE]\n\n"]
    async with TestServer(app) as server:
        provider = HttpProvider("m", base_url=str(server.make_url("/v1")), dialect=DIALECTS["fireworks"])
        try:
            result = await decode(ReferenceDraft("a b"), provider)
        finally:
            await provider.aclose()
    assert wire.bodies[0]["prediction"] == {"type": "content", "content": "a b"}
    assert [report.num_accepted_tokens for report in result.rounds] == [4]
    assert result.fallbacks == ()
