"""Records of measurements whose times are drawn, not measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from llm_spec.cli.bench.contenders import ContenderSpec
from llm_spec.cli.bench.figures import BenchSummarizer, ContenderSummary
from llm_spec.cli.bench.prompts import BenchPrompt, prompt_from_text
from llm_spec.cli.bench.records import AnswerKey, AnswerRecord, PromptBlockRecord
from llm_spec.cli.bench.run import iterate_contender_orders

PLAIN = ContenderSpec(name="plain", kind="plain", target="t")


def draw_noise(rng: np.random.Generator, scale: float) -> float:
    """What a machine does: a little every time, and a lot once in a while."""
    return float(rng.normal(0.0, scale) + (rng.random() < 0.05) * rng.exponential(0.3))


def simulate(
    contenders: dict[str, float],
    *,
    num_prompts: int,
    seed: int,
    scale: float = 0.025,
    num_runs: int = 1,
    rotates: bool = True,
    trouble: Callable[[int, int], float] = lambda _place, _prompt: 0.0,
) -> list[ContenderSummary]:
    """Contenders by how many times plain's time they take; `trouble` is more time, by place and prompt, in logs."""
    rng, names = np.random.default_rng(seed), ["plain", *contenders]
    prompts: list[BenchPrompt] = [prompt_from_text(f"prompt {n}", n) for n in range(num_prompts)]
    base_s = rng.lognormal(0.0, 0.6, num_prompts)
    answers: list[AnswerRecord] = []
    orders = iterate_contender_orders(len(names), seed)
    for run in range(num_runs):
        for prompt, order in enumerate(islice(orders, num_prompts)):
            for place, index in enumerate(order if rotates else range(len(names))):
                key = AnswerKey(run=run, block=prompt, prompt=prompt, turn=0, contender=names[index], place=place)
                log_s = draw_noise(rng, scale) + trouble(place, prompt)
                factor = contenders.get(names[index], 1.0)
                answers.append(AnswerRecord(key=key, total_s=float(base_s[prompt] * factor * np.exp(log_s))))
    blocks = [
        PromptBlockRecord(run=a.key.run, block=a.key.block, turn=0, contender=a.key.contender, total_s=a.total_s)
        for a in answers
    ]
    summarizer = BenchSummarizer(prompts, answers, blocks, "plain")
    specs = [ContenderSpec(name=name, kind="other", target="t") for name in contenders]
    return [summarizer.summarize(spec) for spec in specs]
