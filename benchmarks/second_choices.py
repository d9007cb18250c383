"""What do a draft's second choices give to `probe`? By virtual clock: the same everywhere.

    python benchmarks/second_choices.py [--answers 12] [--pair 24] [--json FILE]

Greedy answers of 200 tokens at some prices of a server (those of `best_schedule.py`), in tokens a second:

none: the draft tells no second choices.
right: it tells one at each token of which it is unsure. All tokens at which it is wrong are among these, a third of
them; at these the second choice is right with the probability `second`. It knows how likely that is on average.
wrong: it tells as many and believes in them as much, but none is ever right.

The draft is wrong at the same tokens on all sides. `first` are the first two answers of a decoder, together; the
other figures are of those after them. With `--pair` the built-in pair is asked, too: its target answers so many
held-out prompts, greedily and at temperature .8, and its draft tells at each of these tokens what it would have
written. That is played by the same clock at the same prices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from best_schedule import NUM_TOKENS, PLAIN, START_S, WORDS, Costs, draw_misses, make_target, measure_schedule

from llm_spec import (
    ChatRequest,
    DraftCapabilities,
    DraftPiece,
    SecondChoice,
    SpeculativeConfig,
    SpeculativeDecoder,
    TokenSession,
    open_provider,
)
from llm_spec.drafting.text_pieces import split_into_pieces
from llm_spec.simulation import run_virtual

HELDOUT_PROMPTS: Final = Path(__file__).with_name("heldout_prompts.jsonl")
PAIR_TOKENS: Final = 96  # of each prompt's answer
NUM_FIRST: Final = 2  # answers
UNSURE_FACTOR: Final = 3  # tokens of which a draft is unsure, for each at which it is wrong
PRICES: Final = {  # trip, step, row, draft and places of `Costs`
    "25 ms a token, 20 ms away": (20.0, 25.0, 0.3, 3.0, 4),
    "the same, rows of 1 ms": (20.0, 25.0, 1.0, 3.0, 4),
    "the same, rows of 3 ms": (20.0, 25.0, 3.0, 3.0, 4),
    "15 tokens/s, 5 ms away": (5.0, 66.7, 1.0, 8.0, 4),
    "60 tokens/s, 100 ms away": (100.0, 16.7, 0.3, 8.0, 4),
    "one place": (5.0, 66.7, 1.0, 8.0, 1),
}
DRAFTS: Final = ((0.56, 0.29), (0.8, 0.3), (0.8, 0.5), (0.94, 0.59))  # agreement and `second`


class Guess(NamedTuple):
    """What a draft says in the place of a token; `probability`: that its second choice is right, None if it is sure."""

    is_right: bool
    is_second_right: bool
    probability: float | None


def draw_answer(agreement: float, second: float, seed: int) -> list[Guess]:
    rng = random.Random(-seed - 1)  # noqa: S311 - a reproducible draw, no secret
    misses = draw_misses(agreement, seed)
    share = min(1.0, (UNSURE_FACTOR - 1) * (1 - agreement) / agreement)  # of the other tokens
    return [
        Guess(at not in misses, at in misses and rng.random() < second, second / UNSURE_FACTOR)
        if at in misses or rng.random() < share
        else Guess(True, False, None)
        for at in range(NUM_TOKENS)
    ]


def ask_builtin_pair(temperature: float, num_prompts: int) -> list[list[Guess]]:
    """What its draft says in the place of each token that its target writes, in answers of 200 tokens."""
    target, draft = (open_provider(f"builtin:{name}").capabilities.token_model for name in ("target", "draft"))
    assert target is not None
    assert draft is not None
    lines = HELDOUT_PROMPTS.read_text(encoding="utf-8").splitlines()[:num_prompts]
    guesses: list[Guess] = []
    for number, line in enumerate(lines):
        prompt_ids = target.tokenizer.encode_chat(ChatRequest.create(json.loads(line)["messages"]))
        guesses += follow_target(target.open(exact=False), draft.open(exact=False), prompt_ids, temperature, number)
    return [guesses[at : at + NUM_TOKENS] for at in range(0, len(guesses) - NUM_TOKENS + 1, NUM_TOKENS)]


def follow_target(
    target: TokenSession, draft: TokenSession, prompt_ids: Sequence[int], temperature: float, seed: int
) -> Iterator[Guess]:
    rng, unread = np.random.default_rng(seed), prompt_ids
    with closing(target), closing(draft):
        for _ in range(PAIR_TOKENS):
            drafted = draft.forward(unread, num_rows=1)[0].astype(np.float64)
            noise = np.asarray(rng.gumbel(size=drafted.shape), dtype=np.float64)
            own = target.forward(unread, num_rows=1)[0] + temperature * noise  # the best of these is a sample
            probs = np.exp(drafted - drafted.max())
            first, second = np.argsort(-drafted)[:2]
            token_id = int(np.argmax(own))
            yield Guess(token_id == first, token_id == second, float(probs[second] / probs.sum()))
            unread = [token_id]


class Draft:
    """Guesses as `answer` says, wherever it was begun; the space after a word comes with it."""

    name = "draft"

    def __init__(self, token_s: float, *, tells: bool) -> None:
        self.answer: Sequence[Guess] = ()
        self.capabilities = DraftCapabilities(tells_second_choices=tells)
        self._token_s = token_s

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        start = len(split_into_pieces(request.prefix))
        positions = range(start, min(NUM_TOKENS, start + max_tokens))
        async with aclosing(self._write(positions, tells=request.top_logprobs is not None)) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _write(self, positions: range, *, tells: bool) -> AsyncGenerator[DraftPiece]:
        await asyncio.sleep(START_S)
        for at in positions:
            await asyncio.sleep(self._token_s)
            space = " " if at == positions.start else ""
            guess, second = self.answer[at], None
            if tells and guess.probability is not None:
                text = WORDS[at] if guess.is_second_right else "odd"
                second = SecondChoice(f"{space}{text} ", guess.probability)
            yield DraftPiece(f"{space}{WORDS[at] if guess.is_right else 'other'} ", second=second)
        yield DraftPiece("", finish_reason="stop")


class Speed(NamedTuple):
    """Tokens a second."""

    first: float
    later: float


async def measure_side(costs: Costs, answers: Sequence[Sequence[Guess]], *, tells: bool) -> Speed:
    draft = Draft(costs.draft_ms / 1000, tells=tells)
    config = SpeculativeConfig(strategy="probe", max_concurrent_streams=costs.places)
    clock = asyncio.get_running_loop().time
    times_s: list[float] = []
    async with SpeculativeDecoder(draft, make_target(costs), config) as decoder:
        for answer in answers:
            draft.answer = answer
            began_s = clock()
            result = await decoder.decode("Tell me.", temperature=0.0)
            assert result.content.split() == WORDS
            times_s.append(clock() - began_s)
    first, later = times_s[:NUM_FIRST], times_s[NUM_FIRST:]
    return Speed(NUM_TOKENS * len(first) / sum(first), NUM_TOKENS * len(later) / sum(later))


@dataclass(frozen=True)
class Row:
    """One price and one draft."""

    prices: str
    agreement: float
    second: float
    plain: float
    none: Speed
    right: Speed
    wrong: Speed

    def __str__(self) -> str:
        def compare(other: Speed) -> str:
            return f"{other.first / self.none.first:6.3f} {other.later / self.none.later:6.3f}"

        return (
            f"{self.prices:26} {self.agreement:5.2f} {self.second:5.2f}  {self.plain:6.1f} {self.none.later:6.1f} "
            f"{self.right.later:6.1f}   {compare(self.right)}   {compare(self.wrong)}"
        )


def measure_row(prices: str, answers: Sequence[Sequence[Guess]]) -> Row:
    trip_ms, step_ms, row_ms, draft_ms, places = PRICES[prices]
    guesses = [guess for answer in answers for guess in answer]
    agreement = sum(guess.is_right for guess in guesses) / len(guesses)
    costs = Costs(trip_ms, step_ms, row_ms, draft_ms, places, agreement)
    wrong = [[guess._replace(is_second_right=False) for guess in answer] for answer in answers]

    def measure(answers: Sequence[Sequence[Guess]], *, tells: bool = True) -> Speed:
        return run_virtual(measure_side(costs, answers, tells=tells))

    return Row(
        prices=prices,
        agreement=agreement,
        second=sum(guess.is_second_right for guess in guesses) / (len(guesses) * (1 - agreement)),
        plain=measure_schedule(costs, PLAIN, [0]),
        none=measure(answers, tells=False),
        right=measure(answers),
        wrong=measure(wrong),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=12, help="of a decoder, after its first two")
    parser.add_argument("--pair", type=int, default=0, help="held-out prompts for the built-in pair; 0: not asked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'':26} {'':5} {'':5}  {'tokens a second':20}   right / none    wrong / none")
    print(f"{'prices':26} agree second   plain   none  right    first  later    first  later")
    seeds = range(NUM_FIRST + options.answers)
    drafts = [[draw_answer(agreement, second, seed) for seed in seeds] for agreement, second in DRAFTS]
    if options.pair:
        drafts += [ask_builtin_pair(temperature, options.pair) for temperature in (0.0, 0.8)]
    rows: list[Row] = []
    for prices, answers in product(PRICES, drafts):
        rows.append(measure_row(prices, answers))
        print(rows[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
