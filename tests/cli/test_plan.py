"""`llm-spec plan`: the table of estimates, and one line for bad arguments."""

from __future__ import annotations

import asyncio
import re

import pytest

from llm_spec.cli.main import main
from llm_spec.cli.plan import list_simulated_strategies
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

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
    printed, _, advice = plan(capsys, target, draft, "--acceptance", "0.8").rstrip().rpartition("\n\n")
    assert re.findall(r"^(\w+): ", printed, re.MULTILINE) == shown
    assert len(re.findall(r"^  (faster|never faster)", printed, re.MULTILINE)) == len(shown)
    assert len(re.findall(r"^ +80% +\d", printed, re.MULTILINE)) == len(shown)
    left_out = [entry.name for entry in list_simulated_strategies() if entry.name not in shown]
    assert printed.endswith(f"Not with {target} and {draft}: {', '.join(left_out)}.")
    assert advice.startswith(("use: ", "plain: "))


@pytest.mark.parametrize("draft", ["lookup", "suffix", "lookup+suffix"])
def test_a_draft_that_copies_costs_no_time_and_no_money(capsys: pytest.CaptureFixture[str], draft: str) -> None:
    """It is not taken for a chat model; the same draft with a chat model's speed gains less."""
    printed = plan(capsys, "vllm:x", draft, "--acceptance", "0.95")
    assert "  draft   its text is there at once; free\n" in printed
    slow = plan(capsys, "vllm:x", draft, "--acceptance", "0.95", "--draft-first-token-s", "0.3")
    assert "first token after 0.30 s" in slow
    assert compute_judge_speedup(printed) > compute_judge_speedup(slow)
    assert "then 200 tokens/s" in plan(capsys, "vllm:x", f"{draft}+vllm:y", "--acceptance", "0.95")


def compute_judge_speedup(printed: str) -> float:
    found = re.search(r"^judge: .*\n +95% +[\d.]+ s +([\d.]+)x", printed, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_a_draft_that_copies_is_measured_at_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Along the target's own answer: most of what it repeats is right."""
    text = " ".join(f"word{index}" for index in range(20))
    async with ScriptedModelServer(text, latency=ServerLatency(token_s=0.001)) as server:
        pair = ["plan", "--target", f"vllm:any@{server.url}", "--draft", "lookup", "--output", "60"]
        for prompt, least, most in ((f"Repeat: {text}", 80, 100), ("Tell.", 0, 20)):
            assert await asyncio.to_thread(main, [*pair, "--measure", prompt]) == 0
            found = re.search(r"target alone.*?^ +(\d+)% ", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
            assert found is not None
            assert least <= int(found[1]) <= most


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
