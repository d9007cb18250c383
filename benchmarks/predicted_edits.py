"""Predicted edits: files that a model rewrites with a few lines changed, the file before as `prediction`.

    python benchmarks/predicted_edits.py --model torch:FOLDER [--files 20] [--max-tokens N] [--shares 0.02 0.1 0.5]

`llm-spec bench` has no predictions, and no model that writes a given text. The files are modules of Python's standard
library of 100 to 400 lines; a share of their lines is changed, inserted, left out or moved. The model is real, and so
is what its passes cost; what it writes is forced to the edited file by its logits. Plain, prompt lookup (the file
stands in the prompt) and the prediction answer each file in an order that rotates. A file's prompt is read once, before
all of them. Seconds are of whole answers, opening the draft included, by this program's clock; figures are ratios to
plain: the median of the files, and that of their seconds together.
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

from llm_spec import ChatRequest, PromptLookup, SpeculativeDecoder, open_provider
from llm_spec.contract.token_model import TokenModel, TokenSession
from llm_spec.testing import LocalProvider

if TYPE_CHECKING:
    from llm_spec.contract.token_model import FloatArray

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
        self._session = ForcedSession(model.open(), self)

    def open(self, *, exact: bool = True) -> TokenSession:
        return self._session


class ForcedSession:
    """The real session's rows, with the given answer's next token above all others; it keeps the prompt it has read."""

    def __init__(self, session: TokenSession, model: ForcedModel) -> None:
        self._session = session
        self._model = model
        self._prompt_ids: Sequence[int] = ()

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

    def reuse_prefix(self, token_ids: Sequence[int]) -> int:
        is_same = token_ids == self._prompt_ids
        self._prompt_ids = list(token_ids)
        self._session.truncate(len(token_ids) if is_same else 0)
        return self._session.length

    def close(self) -> None:
        """Nothing: the next answer begins with it."""


class Timed(NamedTuple):
    seconds: float
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
    decoder = SpeculativeDecoder(target=LocalProvider(model), draft=PromptLookup() if contender == "lookup" else None)
    started_s = time.perf_counter()
    result = await decoder.decode(request)
    return Timed(time.perf_counter() - started_s, result.content)


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
    seconds: dict[float, list[dict[str, float]]] = {share: [] for share in arguments.shares}
    for index, before in enumerate(texts):
        await answer(model, "plain", before, before, 1)  # reads the prompt
        print(f"file {index + 1}, {before.count(chr(10))} lines:", end="", flush=True)
        for share, found in seconds.items():
            after = edit_file(before, share, index)
            taken = {name: await answer(model, name, before, after, arguments.max_tokens) for name in next(orders)}
            assert len({timed.text for timed in taken.values()}) == 1, "the texts differ"
            found.append({name: timed.seconds for name, timed in taken.items()})
            lookup, prediction = (found[-1]["plain"] / found[-1][name] for name in CONTENDERS[1:])
            print(f"  {share:.0%} lookup {lookup:.2f}x, prediction {prediction:.2f}x", end="", flush=True)
        print(flush=True)
    for share, found in seconds.items():
        for name in CONTENDERS[1:]:
            print(f"{share:4.0%} of lines changed  {name:10}  {describe(found, name)}")


def describe(found: Sequence[dict[str, float]], name: str) -> str:
    ratios = [taken["plain"] / taken[name] for taken in found]
    together = sum(taken["plain"] for taken in found) / sum(taken[name] for taken in found)
    spread = f"worst {min(ratios):.2f}, best {max(ratios):.2f}"
    return f"median {statistics.median(ratios):.2f}x  together {together:.2f}x  {spread}"


if __name__ == "__main__":
    asyncio.run(main())
