"""A real chat model through `torch:` beside transformers on the CPU: plain, and with each side's own drafts.

    python benchmarks/torch_chat.py FOLDER [--threads 1 2] [--temperatures 0 0.7] [--num-prompts 10] [--max-tokens 64]
                                    [--repeats 2] [--early-exit 8] [--only NAME ...] [--kinds copy open] [--no-loading]
                                    [--answers FILE]

FOLDER holds a small instruct model, such as SmolLM2-135M-Instruct. Ten prompts ask for copies (edits, quotes, JSON),
ten are open questions. Each number of threads has a process of its own, and so has each side whose loading is measured.
All contenders answer a prompt one after another, in an order that rotates, and compute in one thread: where two threads
of a process call OpenMP, passes of either are slower. Of the repeats the fastest counts. In each repeat drafts and what
a decoder has learned begin anew, and last from prompt to prompt.

Times are those of whole answers, prompt reading included. A ratio is that of seconds a token, prompt by prompt: first
to transformers' plain decoding, then to the same side's. Same: answers that are the same side's plain ones.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from chat_prompts import KINDS, load_chat_prompts
from llm_spec_torch import TorchModel, TorchProvider

from llm_spec import CascadeDraft, ChatRequest, PromptLookup, ProviderDraft, SpeculativeDecoder, SuffixDraft
from llm_spec.local.pass_threads import run_pass
from llm_spec.local.threads import call_in_own_thread

transformers: Any = importlib.import_module("transformers")  # of which little is typed

TORCH_PLAIN: Final = "torch: plain"
HF_PLAIN: Final = "transformers plain"


class Answer(NamedTuple):
    """What a contender said, and how fast."""

    num_tokens: int
    seconds: float
    text: str

    @property
    def seconds_per_token(self) -> float:
        """An answer without tokens counts as one of one."""
        return self.seconds / max(1, self.num_tokens)


class AnswerLog:
    """All contenders' answers to a request, by a name for it; one JSON object a line. Without a file nothing is kept.

    What a draft or decoder learned from answers that are read from the file is lost.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[str, dict[str, Answer]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._answers[entry["request"]] = {name: Answer(*answer) for name, answer in entry["answers"].items()}

    def get(self, request: str) -> dict[str, Answer] | None:
        """None: it has to be measured."""
        return self._answers.get(request)

    def add(self, request: str, answers: Mapping[str, Answer]) -> None:
        self._answers[request] = dict(answers)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"request": request, "answers": answers}) + "\n")


Contender = Callable[[ChatRequest], Answer]


def load_transformers(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer as transformers loads them."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def make_transformers_contender(model: Any, tokenizer: Any, **options: Any) -> Contender:
    """transformers' `generate`."""

    def answer(request: ChatRequest) -> Answer:
        messages = [message.to_openai() for message in request.messages]
        temperature = request.sampling.temperature
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        transformers.set_seed(1)
        started = time.perf_counter()
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

        @torch.inference_mode()
        def generate() -> Any:
            return model.generate(**inputs, max_new_tokens=request.max_tokens, **sampling, **options)

        out = run_pass(generate, num_threads=torch.get_num_threads())
        new_ids = out[0, inputs["input_ids"].shape[1] :]
        text: str = tokenizer.decode(new_ids, skip_special_tokens=True)
        return Answer(len(new_ids), time.perf_counter() - started, text)

    return answer


def make_torch_contender(draft: Any, target: TorchProvider) -> Contender:
    """A decoder of this library."""
    decoder = SpeculativeDecoder(target=target, draft=draft)

    def answer(request: ChatRequest) -> Answer:
        started = time.perf_counter()
        result = asyncio.run(decoder.decode(request))
        return Answer(result.usage.output_tokens if result.usage else 0, time.perf_counter() - started, result.content)

    return answer


def make_contenders(hf: tuple[Any, Any], exact: TorchModel, loose: TorchModel, early_exit: int) -> dict[str, Contender]:
    """Both sides, with nothing learned yet."""
    target = TorchProvider(exact)
    first_layers = ProviderDraft(TorchProvider(exact.make_early_exit_draft(early_exit)))
    return {
        HF_PLAIN: make_transformers_contender(*hf),
        "transformers prompt lookup": make_transformers_contender(*hf, prompt_lookup_num_tokens=10),
        "transformers early exit": make_transformers_contender(*hf, assistant_early_exit=early_exit),
        TORCH_PLAIN: make_torch_contender(None, target),
        "torch: plain, exact=false": make_torch_contender(None, TorchProvider(loose)),
        "torch: lookup": make_torch_contender(PromptLookup(), target),
        "torch: suffix": make_torch_contender(SuffixDraft(), target),
        "torch: early exit": make_torch_contender(first_layers, target),
        "torch: lookup+early exit": make_torch_contender(CascadeDraft(PromptLookup(), first_layers), target),
    }


def measure(
    contenders: dict[str, Contender],
    requests: Sequence[ChatRequest],
    best: dict[tuple[str, int], Answer],
    log: AnswerLog,
    what: str,
) -> None:
    """Let every contender answer every request, and keep the fastest of its answers in `best`."""
    names = list(contenders)
    for contender in contenders.values():
        contender(ChatRequest.create("Say hello.", max_tokens=4))
    for number, request in enumerate(requests):
        shift = number % len(names)
        key = f"{what}: {request.messages[0].text}"
        if (answers := log.get(key)) is None:
            answers = {name: contenders[name](request) for name in names[shift:] + names[:shift]}
            log.add(key, answers)
        for name, answer in answers.items():
            known = best.get((name, number))
            if known is None or answer.seconds_per_token < known.seconds_per_token:
                best[name, number] = answer


def print_table(title: str, names: Sequence[str], best: dict[tuple[str, int], Answer], numbers: range) -> None:
    """One table of one kind of prompts."""
    print(f"\n{title}\n{'':<28}{'tokens/s':>9}{'of transformers':>17}{'of own plain: median, worst':>29}{'same':>10}")
    for name in names:
        own = [best[name, number] for number in numbers]
        plain_name = HF_PLAIN if name.startswith("transformers") else TORCH_PLAIN
        plain = [best[plain_name, number] for number in numbers]
        hf = [best[HF_PLAIN, number] for number in numbers]
        to_hf = statistics.median(b.seconds_per_token / a.seconds_per_token for a, b in zip(own, hf, strict=True))
        ratios = [b.seconds_per_token / a.seconds_per_token for a, b in zip(own, plain, strict=True)]
        same = sum(a.text == b.text for a, b in zip(own, plain, strict=True))
        speed = sum(a.num_tokens for a in own) / sum(a.seconds for a in own)
        print(
            f"{name:<28}{speed:>9.1f}{to_hf:>16.2f}x{statistics.median(ratios):>21.2f}x {min(ratios):.2f}x"
            f"{same:>7}/{len(own)}"
        )


def read_memory_mb(field: str) -> int:
    """One of the figures that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(field + ":"))


def measure_loading(side: str, folder: Path, threads: int) -> None:
    """Print what loading one side takes, with imports beyond torch's, and what memory it has then."""
    torch.set_num_threads(threads)
    before = read_memory_mb("VmRSS")
    started = time.perf_counter()
    model: Any = load_transformers(folder) if side == "transformers" else TorchModel(folder, device="cpu")
    seconds = time.perf_counter() - started
    if side == "transformers":  # its weights are mapped, and in memory once they have been used
        make_transformers_contender(*model)(ChatRequest.create("Say hello.", max_tokens=4))
    else:
        make_torch_contender(None, TorchProvider(model))(ChatRequest.create("Say hello.", max_tokens=4))
    print(
        f"{side:<14}{seconds:>6.1f} s to load;{read_memory_mb('VmRSS') - before:>6} MB more are resident after a first "
        f"answer ({read_memory_mb('RssAnon')} MB in all that are no file's); at most {read_memory_mb('VmHWM')} MB"
    )


def compare(arguments: argparse.Namespace, threads: int) -> None:
    """All tables of one number of threads."""
    torch.set_num_threads(threads)
    hf = call_in_own_thread(lambda: load_transformers(arguments.folder))
    exact = TorchModel(arguments.folder, device="cpu", max_requests=1)
    loose = TorchModel(arguments.folder, device="cpu", max_requests=1, exact=False)
    print(f"widths of equal bits: {list(exact.pass_widths)}" if exact.same_text else "no widths of equal bits")
    log = AnswerLog(arguments.answers)
    prompts = {
        kind: texts for kind, texts in load_chat_prompts(arguments.num_prompts).items() if kind in arguments.kinds
    }
    for temperature in arguments.temperatures:
        requests = [
            ChatRequest.create(text, max_tokens=arguments.max_tokens, temperature=temperature, seed=1)
            for texts in prompts.values()
            for text in texts
        ]
        best: dict[tuple[str, int], Answer] = {}
        names: Sequence[str] = ()
        for repeat in range(arguments.repeats):
            contenders = make_contenders(hf, exact, loose, arguments.early_exit)
            contenders = {n: c for n, c in contenders.items() if "plain" in n or any(o in n for o in arguments.only)}
            names = list(contenders)
            options = f"{arguments.max_tokens} tokens, {', '.join(contenders)}"
            measure(contenders, requests, best, log, f"{threads} threads, {temperature:g}, {repeat}, {options}")
        start = 0
        for kind, texts in prompts.items():
            title = f"{threads} threads, temperature {temperature:g}, {len(texts)} {kind} prompts"
            print_table(title, names, best, range(start, start + len(texts)))
            start += len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--early-exit", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; plain decoding is always there")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of prompts")
    parser.add_argument("--no-loading", dest="loading", action="store_false", help="without the time of loading")
    parser.add_argument("--answers", type=Path, help="keep answers in this file, and go on with those that it has")
    parser.add_argument("--part", choices=["transformers", "torch:", "compare"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "compare":
        compare(arguments, arguments.threads[0])
    elif arguments.part:
        measure_loading(arguments.part, arguments.folder, arguments.threads[0])
    else:
        print(f"torch {torch.__version__}, float32, {torch.backends.cpu.get_cpu_capability()}")
        for threads in arguments.threads:
            loading = ("transformers", "torch:", "torch:") if arguments.loading else ()  # what was found once is kept
            for part in (*loading, "compare"):
                options = ["--threads", str(threads), "--part", part]
                command = [sys.executable, __file__, *sys.argv[1:], *options]
                subprocess.run(command, check=True)  # noqa: S603 - our own code


if __name__ == "__main__":
    main()
