"""Predicted edits: files that a model rewrites with a few lines changed, the file before as `prediction`.

    python benchmarks/predicted_edits.py --model torch:FOLDER [--files 20] [--max-tokens N] [--shares 0.02 0.1 0.5]

The files are modules of Python's standard library of 100 to 400 lines; a share of their lines is changed, inserted,
left out or moved. The model is real, and so is what its passes cost; what it writes is forced to the edited file by its
logits. Plain, prompt lookup (the file stands in the prompt) and the prediction answer each file in an order that
rotates. Seconds are from the first text to the last, by this program's clock; figures are ratios to plain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llm_spec import (
    ChatRequest,
    PromptLookup,
    Round,
    SpeculativeDecoder,
    TextDelta,
    TokenModel,
    TokenSession,
    open_provider,
)
from llm_spec.testing import LocalProvider

if TYPE_CHECKING:
    from llm_spec.contract.local import FloatArray

MIN_LINES, MAX_LINES = 100, 400
CONTENDERS = ("plain", "lookup", "prediction")


class ForcedModel:
    """A token model that reads and computes as the real one, and then writes a given answer."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model
        self.name = model.name
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.max_width = model.max_width
        self.same_text = model.same_text
        self.num_prompt_tokens = 0
        self.answer_ids: list[int] = []

    def open(self, *, exact: bool = True) -> TokenSession:
        return ForcedSession(self._model.open(exact=exact), self)


class ForcedSession:
    """The real session's rows, with the given answer's next token above all others."""

    def __init__(self, session: TokenSession, model: ForcedModel) -> None:
        self._session = session
        self._model = model

    @property
    def length(self) -> int:
        return self._session.length

    def forward(self, token_ids: Sequence[int], *, num_rows: int) -> FloatArray:
        rows = self._session.forward(token_ids, num_rows=num_rows)
        first = self._session.length - num_rows + 1 - self._model.num_prompt_tokens
        for row, position in enumerate(range(first, first + num_rows)):
            rows[row, self._model.answer_ids[min(max(position, 0), len(self._model.answer_ids) - 1)]] = 1e6
        return rows

    def truncate(self, length: int) -> None:
        self._session.truncate(length)

    def close(self) -> None:
        self._session.close()


class Timed(NamedTuple):
    seconds: float
    num_rounds: int
    text: str


def find_files(num_files: int) -> list[str]:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(list_modules())]
    fitting = [text for text in texts if MIN_LINES <= text.count("\n") <= MAX_LINES]
    random.Random(1).shuffle(fitting)  # noqa: S311 - the same files each time, no secret
    return fitting[:num_files]


def list_modules() -> list[Path]:
    return list(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def edit_file(text: str, share: float, seed: int) -> str:
    """The file with a share of its lines changed: a word, a line more, one less, one elsewhere."""
    rng = random.Random(seed)  # noqa: S311 - the same edits each time, no secret
    names = re.findall(r"[A-Za-z_]{4,}", text)
    edited: list[str] = []
    for line in text.splitlines(keepends=True):
        kind = rng.random() if rng.random() < share else 1.0
        words = re.findall(r"[A-Za-z_]{3,}", line)
        if kind < 0.6 and words:
            edited.append(line.replace(rng.choice(words), f"{rng.choice(names)}_{rng.randrange(99)}", 1))
        elif kind < 0.75:
            edited += [line, f"    {rng.choice(names)} = {rng.choice(names)}({rng.randrange(999)})\n"]
        elif kind < 0.9:
            continue
        elif kind < 1.0:
            edited.insert(rng.randrange(len(edited) + 1), line)
        else:
            edited.append(line)
    return "".join(edited)


async def answer(model: ForcedModel, contender: str, before: str, after: str, max_tokens: int | None) -> Timed:
    model.answer_ids = [*model.tokenizer.encode(after), min(model.tokenizer.eos_token_ids)]
    num_tokens = min(len(model.answer_ids), max_tokens or len(model.answer_ids))
    request = ChatRequest.create(
        f"Rewrite this file:\n{before}",
        max_tokens=num_tokens,
        temperature=0.0,
        prediction=before if contender == "prediction" else None,
    )
    model.num_prompt_tokens = len(model.tokenizer.encode_chat(request))
    decoder = SpeculativeDecoder(PromptLookup() if contender == "lookup" else None, LocalProvider(model))
    text, first_s, last_s, num_rounds = "", 0.0, 0.0, 0
    async with decoder.stream(request, rounds=True) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                text += event.text
            num_rounds += isinstance(event, Round)
    return Timed(last_s - first_s, num_rounds, text)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a local model: torch:FOLDER or onnx:FOLDER")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.1, 0.5])
    arguments = parser.parse_args()
    token_model = open_provider(arguments.model).capabilities.token_model
    if token_model is None:
        raise SystemExit(f"{arguments.model} is not a model in this process")
    model = ForcedModel(token_model)
    texts = find_files(arguments.files)
    orders = itertools.cycle([CONTENDERS[i:] + CONTENDERS[:i] for i in range(3)])
    print(f"{arguments.model}: {len(texts)} files, answers of at most {arguments.max_tokens} tokens, ratios to plain")
    for share in arguments.shares:
        ratios: dict[str, list[float]] = {"lookup": [], "prediction": []}
        for index, before in enumerate(texts):
            after = edit_file(before, share, index)
            taken = {name: await answer(model, name, before, after, arguments.max_tokens) for name in next(orders)}
            assert len({timed.text for timed in taken.values()}) == 1, "the texts differ"
            for name, found in ratios.items():
                found.append(taken["plain"].seconds / taken[name].seconds)
        for name, found in ratios.items():
            spread = f"worst {min(found):.2f}, best {max(found):.2f}"
            print(
                f"{share:4.0%} of lines changed  {name:10}  median {statistics.median(found):.2f}x  {spread}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
