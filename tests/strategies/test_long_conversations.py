"""A long conversation: it is read once for an answer, and never for long between two turns of the event loop."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from llm_spec import (
    Budget,
    CascadeDraft,
    ChatRequest,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    SuffixDraft,
    Usage,
)
from llm_spec.contract.draft import DraftProvider
from llm_spec.contract.provider import Capabilities, LlmProvider
from llm_spec.drafting.ngrams import OccurrenceIndex
from llm_spec.measure import tokens as text_pieces
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.simulated import SimulatedTarget

NUM_WORDS: Final = 30_000
# In a turn: a step of the index, and twice (budget, strategy) the estimate of the whole from 16,384 characters of it.
MAX_IN_TURN: Final = 8_000

_rng = random.Random(1)  # noqa: S311 - a repeatable text
WORDS: Final = [f"w{_rng.randrange(800)}" for _ in range(NUM_WORDS)]
CONVERSATION: Final = " ".join(WORDS)
ANSWER: Final = " ".join(_rng.choices(WORDS, k=40) + WORDS[500:560] + _rng.choices(WORDS, k=40))


class Counted:
    """The pattern that cuts text, and the index that takes pieces in: `in_turn` since the loop's last turn, `total`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_turn = self.most_in_turn = self.num_indexed = 0
        self._pattern: re.Pattern[str] = text_pieces._PIECE
        append, turn = OccurrenceIndex.append, asyncio.Handle._run

        def counting_append(index: OccurrenceIndex[Any], item: Any) -> None:
            self.num_indexed += 1
            append(index, item)

        def counting_turn(handle: asyncio.Handle) -> None:
            self.in_turn = 0
            turn(handle)
            self.most_in_turn = max(self.most_in_turn, self.in_turn)

        monkeypatch.setattr(text_pieces, "_PIECE", self)
        monkeypatch.setattr(OccurrenceIndex, "append", counting_append)
        monkeypatch.setattr(asyncio.Handle, "_run", counting_turn)

    def findall(self, text: str) -> list[str]:
        found: list[str] = self._pattern.findall(text)
        self.in_turn += len(found)
        return found

    def finditer(self, text: str, start: int) -> Iterator[re.Match[str]]:
        for match in self._pattern.finditer(text, start):
            self.in_turn += 1
            yield match


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


DRAFTS: Final[dict[str, Any]] = {
    "lookup": PromptLookup,
    "suffix": SuffixDraft,
    "given": lambda: ReferenceDraft(CONVERSATION),
    "joined": lambda: CascadeDraft(PromptLookup(max_ngram=8, min_ngram=8), SuffixDraft()),
    "model": lambda: ProviderDraft(ScriptedProvider(ANSWER.replace("w1", "x1"), usage=Usage(output_tokens=1))),
}


def target_of(strategy: str) -> LlmProvider:
    if strategy == "probe":
        return SimulatedTarget(ANSWER, token_s=0.01, first_token_s=0.02, by_ids=True)
    can = Capabilities(continue_prefix=True, prediction=True)
    return ScriptedProvider(ANSWER, capabilities=can, delay_piece_s=0.01, usage=Usage(output_tokens=1))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("strategy", ["race", "probe", "judge", "predict", "regenerate"])
def test_no_turn_of_the_loop_is_long(strategy: Any, draft: str, counted: Counted) -> None:
    """Counted in pieces of text that are cut, indexed or counted between two turns; with a budget, which counts too."""
    config = SpeculativeConfig(strategy=strategy, budget=Budget(max_tokens=10**9))
    drafter: DraftProvider = DRAFTS[draft]()
    decoder = SpeculativeDecoder(target=target_of(strategy), draft=drafter, config=config)
    result = run_virtual(decoder.decode(ChatRequest.create(CONVERSATION, temperature=0)))
    assert result.content == ANSWER
    assert counted.most_in_turn <= MAX_IN_TURN


@pytest.mark.parametrize("draft", ["lookup", "suffix", "given"])
@pytest.mark.parametrize("strategy", ["race", "probe", "judge"])
def test_a_conversation_is_indexed_once(strategy: Any, draft: str, counted: Counted) -> None:
    """However often a draft begins anew; of the answer a few pieces each time."""
    decoder = SpeculativeDecoder(
        target=target_of(strategy), draft=DRAFTS[draft](), config=SpeculativeConfig(strategy=strategy)
    )
    result = run_virtual(decoder.decode(ChatRequest.create(CONVERSATION, temperature=0)))
    assert result.content == ANSWER
    assert counted.num_indexed <= NUM_WORDS + 20 * 140


@pytest.mark.parametrize("num_pieces", [1000, 4000])
def test_realigning_a_draft_that_writes_once_reads_each_piece_once(num_pieces: int, counted: Counted) -> None:
    """Whatever the answer says meanwhile: the draft departed from it at its first word."""
    answer = " ".join(f"other{n}" for n in range(100))
    draft = ProviderDraft(ScriptedProvider(" ".join(f"word{n}" for n in range(num_pieces)), delay_piece_s=0.001))
    target = ScriptedProvider(answer, capabilities=Capabilities(continue_prefix=True), delay_piece_s=0.05)
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="race"))
    assert run_virtual(decoder.decode("go", temperature=0)).content == answer
    assert num_pieces <= counted.num_indexed <= 2 * num_pieces + 10
