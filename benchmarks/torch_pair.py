"""Speculative decoding with llm_spec_torch beside transformers' own assisted generation: same pair, prompts, threads.

    python benchmarks/torch_pair.py [--target FOLDER --draft FOLDER --prompts FILE.jsonl]
                                    [--num-prompts 40] [--max-tokens 96] [--threads 1] [--temperatures 0 1]

By default the trained pair of `tests/peers/models`, on a CPU. Each line of the prompt file has `messages`. Transformers
gets its best settings, not its defaults: the number of assistant tokens, constant or heuristic, and the confidence
threshold are searched on the first prompts, for each temperature. Then all contenders answer every prompt in an order
that rotates, so that whatever else the machine does falls on all alike. Figures are tokens a second over whole answers
(prompt reading included), and ratios of them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llm_spec_torch import TorchProvider

from llm_spec import (
    CascadeDraft,
    ChatMessage,
    ChatRequest,
    LlmProvider,
    PromptLookup,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
)

transformers: Any = importlib.import_module("transformers")

PAIR = Path(__file__).parents[1] / "tests" / "peers" / "models"
PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
SEARCH_PROMPTS = 4
NUM_ASSISTANT_TOKENS = (1, 2, 3, 4, 6)
CONFIDENCES = (0.0, 0.4)
SCHEDULES = ("constant", "heuristic")


class Answer(NamedTuple):
    """What a contender said, and how fast."""

    num_tokens: int
    seconds: float
    text: str


Contender = Callable[[ChatRequest], Answer]


class AssistedGenerator:
    """transformers' `generate`, with an assistant model or without."""

    def __init__(self, folder: Path, model: Any, assistant: Any = None) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model, self._assistant = model, assistant

    def set(self, num_tokens: int, confidence: float, schedule: str) -> None:
        config = self._assistant.generation_config
        config.num_assistant_tokens = num_tokens
        config.num_assistant_tokens_schedule = schedule
        config.assistant_confidence_threshold = confidence

    def __call__(self, request: ChatRequest) -> Answer:
        messages = [message.to_openai() for message in request.messages]
        started = time.perf_counter()
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        temperature = request.sampling.temperature
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        with torch.inference_mode():
            out = self._model.generate(
                **inputs, assistant_model=self._assistant, max_new_tokens=request.max_tokens, **sampling
            )
        new_ids = out[0, inputs["input_ids"].shape[1] :]
        text: str = self._tokenizer.decode(new_ids, skip_special_tokens=True)
        return Answer(len(new_ids), time.perf_counter() - started, text)


def load(folder: Path) -> Any:
    """A checkpoint as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def search_best_settings(assisted: AssistedGenerator, requests: list[ChatRequest]) -> tuple[int, float, str]:
    """The settings that answer the first prompts fastest."""
    speeds: dict[tuple[int, float, str], float] = {}
    for settings in itertools.product(NUM_ASSISTANT_TOKENS, CONFIDENCES, SCHEDULES):
        assisted.set(*settings)
        answers = [assisted(request) for request in requests]
        speeds[settings] = sum(a.num_tokens for a in answers) / sum(a.seconds for a in answers)
    best = max(speeds, key=lambda settings: speeds[settings])
    assisted.set(*best)
    return best


def make_our_contender(draft: Any, target: LlmProvider) -> Contender:
    """A decoder of this library as a contender."""
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(strategy="auto"))

    def answer(request: ChatRequest) -> Answer:
        started = time.perf_counter()
        result = asyncio.run(decoder.decode(request))
        return Answer(result.usage.output_tokens if result.usage else 0, time.perf_counter() - started, result.content)

    return answer


def measure(contenders: dict[str, Contender], requests: list[ChatRequest]) -> dict[str, list[Answer]]:
    """Every contender's answer to every request."""
    names = list(contenders)
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for contender in contenders.values():
        contender(requests[0])
    for number, request in enumerate(requests):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            answers[name].append(contenders[name](request))
    return answers


def compute_tokens_per_s(answers: Iterable[Answer]) -> float:
    """Tokens a second."""
    answers = list(answers)
    return sum(a.num_tokens for a in answers) / sum(a.seconds for a in answers)


def print_table(temperature: float, answers: dict[str, list[Answer]]) -> None:
    """One table."""
    assisted, plain = answers["transformers assisted"], answers["llm_spec plain"]
    print(f"temperature {temperature:g}")
    print(f"{'':<28}{'tokens/s':>9}{'of assisted':>13}{'of plain':>10}{'same as plain':>15}")
    for name, own in answers.items():
        same = sum(a.text == b.text for a, b in zip(own, plain, strict=True))
        print(
            f"{name:<28}{compute_tokens_per_s(own):>9.0f}"
            f"{compute_tokens_per_s(own) / compute_tokens_per_s(assisted):>12.2f}x"
            f"{compute_tokens_per_s(own) / compute_tokens_per_s(plain):>9.2f}x"
            f"{same:>9} of {len(own)}"
        )
    ratios = [
        p.seconds / p.num_tokens / (s.seconds / s.num_tokens)
        for p, s in zip(plain, answers["llm_spec draft"], strict=True)
    ]
    print(f"speculative to plain, prompt by prompt: median {statistics.median(ratios):.2f}x, worst {min(ratios):.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=PAIR / "target")
    parser.add_argument("--draft", type=Path, default=PAIR / "draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    assisted = AssistedGenerator(arguments.target, load(arguments.target), load(arguments.draft))
    target, draft = TorchProvider(arguments.target, device="cpu"), TorchProvider(arguments.draft, device="cpu")
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    conversations = [ChatRequest.create(json.loads(line)["messages"]).messages for line in lines]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads, float32")
    contenders: dict[str, Contender] = {
        "transformers plain": AssistedGenerator(arguments.target, load(arguments.target)),
        "transformers assisted": assisted,
        "llm_spec plain": make_our_contender(None, target),
        "llm_spec draft": make_our_contender(ProviderDraft(draft), target),
        "llm_spec lookup + draft": make_our_contender(CascadeDraft(PromptLookup(), ProviderDraft(draft)), target),
    }
    for temperature in arguments.temperatures:
        requests = [make_request(c, arguments.max_tokens, temperature) for c in conversations]
        num_tokens, confidence, schedule = search_best_settings(assisted, requests[:SEARCH_PROMPTS])
        print(f"\ntransformers' best settings: {num_tokens} assistant tokens, confidence {confidence:g}, {schedule}")
        print_table(temperature, measure(contenders, requests))


def make_request(messages: tuple[ChatMessage, ...], max_tokens: int, temperature: float) -> ChatRequest:
    return ChatRequest.create(messages, max_tokens=max_tokens, temperature=temperature, seed=1)


if __name__ == "__main__":
    main()
