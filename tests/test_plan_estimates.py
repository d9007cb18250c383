"""`llm-spec plan`: estimates by the strategies themselves, and the table that shows them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llm_spec import ChatMessage, ChatRequest, ConfigError, Price, ReferenceDraft, SpeculativeConfig, SpeculativeDecoder
from llm_spec.chat_response import complete_from_stream
from llm_spec.cli import main
from llm_spec.plan_estimates import (
    ModelSpeed,
    PlanScenario,
    estimate_answer,
    find_break_even,
    planned_strategies,
)
from llm_spec.simulation import SimulatedHostedModel, run_virtual

WORDS = "".join(f"Line {n} of what is known.\n" for n in range(20))
SITUATION = PlanScenario(
    context=2000,
    output=600,
    acceptance=0.8,
    target=ModelSpeed(first_token_s=0.5, token_s=1 / 60),
    draft=ModelSpeed(first_token_s=0.3, token_s=1 / 200),
    target_price=Price(input=2.0, output=8.0, cached_input=0.5),
    draft_price=Price(input=0.1, output=0.4),
)


def test_plain_is_what_the_figures_say() -> None:
    """Reading, the round trip, the first token, and the others; the prompt and the answer in money."""
    plain = estimate_answer("plain", SITUATION)
    assert plain.total_s == pytest.approx(0.05 + 0.5 + 2000 * 0.0002 + 599 / 60, abs=0.05)
    assert plain.cost == pytest.approx(2000 * 2e-6 + 600 * 8e-6)


def test_a_prediction_saves_time_and_costs_what_is_rejected() -> None:
    """At every acceptance it costs more than plain; the more is right, the less."""
    plain = estimate_answer("plain", SITUATION)
    found = [estimate_answer("predict", replace(SITUATION, acceptance=a)) for a in (0.0, 0.5, 1.0)]
    assert found[0].total_s > plain.total_s > found[2].total_s
    costs = [estimated.cost for estimated in found if estimated.cost is not None]
    assert plain.cost is not None
    assert costs == sorted(costs, reverse=True)
    assert costs[2] == pytest.approx(plain.cost + 2000 * 0.1e-6 + 600 * 0.4e-6, rel=1e-3)
    assert costs[0] == pytest.approx(costs[2] + 600 * 8e-6, rel=0.05)


def test_a_judge_saves_money_where_the_draft_is_right_and_loses_it_where_not() -> None:
    plain = estimate_answer("plain", SITUATION)
    right, wrong = (estimate_answer("judge", replace(SITUATION, acceptance=a)) for a in (1.0, 0.0))
    assert right.cost is not None
    assert wrong.cost is not None
    assert plain.cost is not None
    assert right.cost < plain.cost < wrong.cost
    assert right.total_s < plain.total_s < wrong.total_s


def test_rounds_of_tokens() -> None:
    """Expected tokens a round over its time, by the lookahead that is the fastest; what never pays is not used."""
    here = replace(SITUATION, round_trip_s=0.0, acceptance=0.5, draft=ModelSpeed(first_token_s=0.3, token_s=0.0))
    plain = estimate_answer("plain", here)
    one = estimate_answer("tokens", replace(here, max_lookahead=1))
    assert one.total_s == pytest.approx(plain.total_s + 0.3 - 599 / 60 * (1 - 1 / 1.5))
    many = estimate_answer("tokens", here)
    assert many.total_s == pytest.approx(plain.total_s + 0.3 - 599 / 60 / 2, rel=1e-3)
    dear = replace(here, verify_token_s=1 / 60)
    assert estimate_answer("tokens", dear) == plain
    assert find_break_even("tokens", replace(dear, verify_token_s=1 / 120))[0] == 0.55


def test_break_even() -> None:
    """From there on a strategy is faster, or cheaper; below it is not."""
    faster, cheaper = find_break_even("predict", SITUATION)
    assert cheaper is None
    assert faster is not None
    assert 0.0 < faster < 1.0
    plain = estimate_answer("plain", SITUATION)
    assert estimate_answer("predict", replace(SITUATION, acceptance=faster)).total_s < plain.total_s
    assert estimate_answer("predict", replace(SITUATION, acceptance=faster - 0.05)).total_s >= plain.total_s
    _, cheaper = find_break_even("judge", SITUATION)
    assert cheaper == 1.0


@pytest.mark.parametrize("strategy", [entry.name for entry in planned_strategies()])
def test_without_prices_there_is_no_money(strategy: str) -> None:
    """None, not 0; times are the same."""
    free = replace(SITUATION, output=60, target_price=None)
    assert estimate_answer(strategy, free).cost is None
    paid = estimate_answer(strategy, replace(SITUATION, output=60))
    assert paid.cost is not None
    assert estimate_answer(strategy, free).total_s == pytest.approx(paid.total_s)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"context": 0}, "context"), ({"output": 0}, "output"), ({"acceptance": 1.1}, "acceptance")],
)
def test_values_out_of_range(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(SITUATION, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ the command


def plan(capsys: pytest.CaptureFixture[str], target: str, draft: str, *arguments: str) -> str:
    assert main(["plan", "--target", target, "--draft", draft, "--output", "60", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "draft", "shown"),
    [
        ("openai:gpt-4.1", "openai:gpt-4.1-nano", ["predict", "judge"]),
        ("openai:gpt-5.6-terra", "lookup", ["judge"]),
        ("anthropic:claude-sonnet-4-5", "lookup", ["race", "judge"]),
        ("vllm:x", "vllm:y", ["race", "probe", "judge"]),
        ("mistral:x", "mistral:y", ["race", "predict", "judge"]),
        ("builtin:target", "lookup+builtin:draft", ["tokens"]),
        ("torch:x", "suffix", ["tokens"]),
        ("onnx:/x", "openai:gpt-4.1-nano", ["judge"]),
        ("mine:x", "lookup", ["race", "probe", "predict", "judge"]),
    ],
)
def test_the_table(capsys: pytest.CaptureFixture[str], target: str, draft: str, shown: list[str]) -> None:
    """Each strategy that the target can serve, what it wins, and from where on; the others are named."""
    printed = plan(capsys, target, draft, "--acceptance", "0.8")
    assert re.findall(r"^(\w+): ", printed, re.MULTILINE) == shown
    assert len(re.findall(r"^  (faster|never faster)", printed, re.MULTILINE)) == len(shown)
    assert len(re.findall(r"^ +80% +\d", printed, re.MULTILINE)) == len(shown)
    left_out = [entry.name for entry in planned_strategies() if entry.name not in shown]
    assert printed.endswith(f"Not with {target} and {draft}: {', '.join(left_out)}.\n")


def test_prices(capsys: pytest.CaptureFixture[str]) -> None:
    """Money is shown where both prices are known."""
    printed = plan(capsys, "openai:gpt-4.1", "openai:gpt-4.1-nano")
    assert "2 in, 8 out, 0.5 cached per million tokens" in printed
    assert "never cheaper" in printed
    assert " -0.0" in printed
    printed = plan(capsys, "vllm:x", "vllm:y")
    assert printed.count("price not known") == 2
    assert "cheaper" not in printed


def test_measured_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the models themselves."""
    pair = ["--target", "builtin:target", "--draft", "builtin:draft", "--output", "60"]
    assert main(["plan", *pair, "--measure", "def area(radius):", "--target-price", "1:5", "--draft-price", "0:0"]) == 0
    printed = capsys.readouterr().out
    assert "1 in, 5 out per million tokens" in printed
    assert "\ntokens: " in printed
    assert "then 60 tokens/s" not in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target-price", "cheap"], "IN:OUT"),
        (["--draft-price", "1"], "IN:OUT"),
        (["--target-tokens-per-s", "0"], "--target-tokens-per-s"),
        (["--acceptance", "2"], "acceptance"),
        (["--context", "0"], "context"),
        (["--streams", "0"], "max_concurrent_streams"),
        (["--measure", "hello", "--target", "nobody:x"], "nobody"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert main(["plan", "--target", "a:b", "--draft", "c:d", *arguments]) == 2
    errors = capsys.readouterr().err
    assert named in errors
    assert errors.count("\n") == 1


# ------------------------------------------------------------------------------------------ the model behind it


def test_a_hosted_model_remembers_what_it_has_read() -> None:
    """The second prompt that begins like the first is cached as far as that."""

    async def check() -> None:
        model = SimulatedHostedModel("a b c", read_token_s=1.0)
        first = await complete_from_stream(model, ChatRequest.create("one two three"))
        second = await complete_from_stream(model, ChatRequest.create("one two four five"))
        assert first.usage is not None
        assert second.usage is not None
        assert (first.usage.input_tokens, first.usage.cached_input_tokens) == (3, 0)
        assert (second.usage.input_tokens, second.usage.cached_input_tokens) == (4, 2)

    run_virtual(check())


def test_a_hosted_model_counts_predictions() -> None:
    model = SimulatedHostedModel("a b c d")
    result = run_virtual(
        SpeculativeDecoder(ReferenceDraft("a b x d e"), model, SpeculativeConfig(strategy="predict")).decode("q")
    )
    assert result.usage is not None
    assert (result.usage.accepted_prediction_tokens, result.usage.rejected_prediction_tokens) == (3, 2)
    assert result.usage.output_tokens == 6


def test_a_hosted_model_judges() -> None:
    config = SpeculativeConfig(strategy="judge")
    result = run_virtual(SpeculativeDecoder(ReferenceDraft(WORDS), SimulatedHostedModel(WORDS), config).decode("q"))
    assert (result.content, result.guarantee) == (WORDS, "judged")
    messages = (ChatMessage("user", "q"), ChatMessage("assistant", WORDS[:25]), ChatMessage("user", "go on"))
    rest = run_virtual(complete_from_stream(SimulatedHostedModel(WORDS), ChatRequest(messages=messages)))
    assert rest.content == WORDS[25:]
