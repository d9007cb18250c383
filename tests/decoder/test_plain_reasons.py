"""Why nothing was speculated: each reason in a situation of its own, and none that claims what was not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_spec import Budget, SpeculativeConfig, SpeculativeDecoder, SpeculativeResult
from llm_spec.decoder.result import PLAIN_REASONS
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.hosted_model import SimulatedHostedModel
from llm_spec.testing.simulated import SimulatedDraft, SimulatedTarget

WORDS = " ".join(f"word{index}" for index in range(60))


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The last of so many answers has the reason; `num_answers` are given one after another by one decoder."""

    strategy: str = "auto"
    agreement: float | None = 0.9  # of the draft; None: there is none
    text: str = WORDS
    num_answers: int = 1
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    config: Callable[[], dict[str, Any]] = dict
    is_hosted: bool = False
    by_ids: bool = True  # whether the target takes token ids


SITUATIONS: dict[str, Situation] = {
    "configured": Situation(strategy="plain"),
    "no_draft": Situation(agreement=None),
    "baseline": Situation(),
    "seed": Situation(options={"seed": 1, "temperature": 1.0}),
    "target": Situation(by_ids=False, num_answers=2),
    "budget": Situation(config=lambda: {"budget": Budget(max_tokens=1)}),
    "not_verified": Situation(strategy="race", text="one two three"),
    "not_measured": Situation(text="one two three", num_answers=8),
    "not_worthwhile": Situation(agreement=0.0, num_answers=8),
    "nothing_drafted": Situation(strategy="race", agreement=-1.0),
}
HELD_ELSEWHERE = {
    "request": "llm_spec_http/test_messages.py",
    "discovery": "decoder/test_feature_discovery.py",
    "refused": "test_refusals.py",
    "retried": "test_refusals.py",
    "draft_failed": "strategies/test_odd_drafts.py",
}


def give_answers(situation: Situation) -> list[SpeculativeResult]:
    async def run() -> list[SpeculativeResult]:
        times: dict[str, Any] = {"first_token_s": 0.4, "token_s": 0.02}
        target = (
            SimulatedHostedModel(situation.text, **times)
            if situation.is_hosted
            else SimulatedTarget(situation.text, by_ids=situation.by_ids, **times)
        )
        draft = None
        if situation.agreement is not None:
            text = situation.text if situation.agreement >= 0 else ""
            draft = SimulatedDraft(text, max(situation.agreement, 0.0), 1)
        config = SpeculativeConfig(strategy=situation.strategy, **situation.config())
        decoder = SpeculativeDecoder(target=target, draft=draft, config=config)
        return [await decoder.decode("tell", **situation.options) for _ in range(situation.num_answers)]

    return run_virtual(run())


def test_each_reason_has_a_situation() -> None:
    """Here, or in the tests of what brings it about."""
    assert {*SITUATIONS, *HELD_ELSEWHERE} == set(PLAIN_REASONS)


@pytest.mark.parametrize("reason", SITUATIONS)
def test_the_reason_of_a_situation(reason: str) -> None:
    """The reason, in words that are in the summary."""
    *_, result = give_answers(SITUATIONS[reason])
    assert result.plain_reason == reason
    assert f"no speculation: {PLAIN_REASONS[reason]}" in result.summary()  # type: ignore[index]


@pytest.mark.parametrize("num_answers", [1, 2, 3, 8])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("text", ["one two three", WORDS])
@pytest.mark.parametrize("strategy", ["auto", "race", "probe"])
def test_no_reason_claims_what_was_not_measured(strategy: str, text: str, agreement: float, num_answers: int) -> None:
    """That the target alone is faster has samples: calls or streams that verified a draft, or answers compared."""
    results = give_answers(Situation(strategy=strategy, text=text, agreement=agreement, num_answers=num_answers))
    usages = [result.usage for result in results if result.usage is not None]
    is_measured = any(usage.extra_input_tokens or usage.cancelled_output_tokens for usage in usages)
    if strategy == "auto":
        is_measured |= any(result.strategy != "plain" for result in results)
    result = results[-1]
    assert is_measured or result.plain_reason != "not_worthwhile"
    assert is_measured or "measurements" not in result.summary()


@pytest.mark.parametrize("strategy", ["predict", "judge", "auto"])
def test_no_first_answer_of_a_hosted_model_claims_a_measurement(strategy: str) -> None:
    """Nothing was measured before it."""
    *_, result = give_answers(Situation(strategy=strategy, agreement=0.0, is_hosted=True))
    assert result.plain_reason != "not_worthwhile"
