"""Contenders whose models are scripts, by virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_spec import LlmProvider
from llm_spec.cli.bench.contenders import Contender, ContenderSpec
from llm_spec.cli.bench.environment import BenchEnvironment
from llm_spec.cli.bench.prompts import BenchPrompt, prompt_from_text
from llm_spec.cli.bench.report import BenchReport
from llm_spec.cli.bench.run import BenchOptions, BenchRun
from llm_spec.contract.draft import DraftProvider
from llm_spec.decoder.config import SpeculativeConfig
from llm_spec.testing import Script, ScriptedProvider

TEXT = "one two three four five six"
MACHINE = BenchEnvironment(
    date="2026-01-02T03:04:05+00:00",
    python="3.11",
    system="Any",
    processor="Any <CPU>",
    cores=2,
    accelerator=None,
    packages={"llm-spec": "1"},
)


def script(text: Script = TEXT, *, token_s: float = 0.1, **options: Any) -> ScriptedProvider:
    """A server that needs twice as long for the first token as for the others."""
    return ScriptedProvider(text, delay_first_s=2 * token_s, delay_piece_s=token_s, **options)


def plain(target: LlmProvider, name: str = "plain") -> Contender:
    kind = "plain" if name == "plain" else "again" if name == "plain again" else "other"
    return Contender(ContenderSpec(name=name, kind=kind, target=target.name), target)


def pair(draft: DraftProvider, target: LlmProvider, strategy: str) -> Contender:
    spec = ContenderSpec(name=strategy, kind="pair", target=target.name, draft=draft.name, strategy=strategy)
    return Contender(spec, target, draft, SpeculativeConfig(strategy=strategy))


def prompts(number: int) -> list[BenchPrompt]:
    return [prompt_from_text(f"question {n}", n) for n in range(1, number + 1)]


async def measure(contenders: Sequence[Contender], questions: Sequence[BenchPrompt], **options: Any) -> BenchRun:
    run = BenchRun(contenders, questions, BenchOptions(**options))
    await run.measure_all_contenders()
    return run


def report_of(run: BenchRun) -> BenchReport:
    return BenchReport.from_run(run, data="a test", environment=MACHINE, loads=(0.5, 0.25))
