"""The random draft: useless, repeatable, and opened by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_spec import ChatRequest, ConfigError, Fixed, SpeculativeConfig, SpeculativeDecoder, open_draft
from llm_spec.contract.token_model import DraftToken
from llm_spec.testing import RANDOM_DRAFT, LocalProvider, RandomDraft, TableModel

if TYPE_CHECKING:
    from llm_spec.contract.token_model import FloatArray


def never(logits: FloatArray, context_ids: Sequence[int]) -> DraftToken:
    raise AssertionError(f"nothing to choose from {logits!r} after {context_ids!r}")


def drafted(seed: int, vocab_size: int) -> list[int]:
    draft = RandomDraft(seed).open_token_draft(TableModel(vocab_size=vocab_size), never, [1, 2])
    return [token.token_id for token in islice(draft.propose([1, 2]), 500)]


def test_ids_are_of_the_targets_vocabulary() -> None:
    """Ids fall all over the target's vocabulary and never outside."""
    token_ids = np.array(drafted(0, 300))
    assert token_ids.min() >= 0
    assert 280 < token_ids.max() < 300


def test_one_seed_drafts_one_sequence() -> None:
    """The same seed drafts the same, another seed something else."""
    assert drafted(1, 300) == drafted(1, 300) != drafted(2, 300)


async def test_words_up_to_the_limit() -> None:
    """As a text draft it gives as many words as asked and ends."""
    async with RandomDraft(3).draft(ChatRequest.create("x"), 5) as pieces:
        got = [piece async for piece in pieces]
    assert len(got) == 6
    assert all(piece.text.startswith(" ") for piece in got[:-1])
    assert got[-1].finish_reason == "stop"


async def test_the_answer_does_not_depend_on_it() -> None:
    """A target of its own mind says what it says, and little of the draft is accepted."""
    target = LocalProvider(TableModel("the answer is what the target says"))
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4))
    result = await SpeculativeDecoder(target=target, draft=RandomDraft(), config=config).decode("x")
    assert result.content == "the answer is what the target says"
    assert result.stats.num_draft_tokens > 50
    assert (result.stats.draft_acceptance_rate or 0.0) < 0.1


@pytest.mark.parametrize(("model", "name"), [("", "random:0"), ("7", "random:7")])
def test_the_entry_reads_a_seed(model: str, name: str) -> None:
    """`random` and `random:SEED` make a draft."""
    assert RANDOM_DRAFT.load(model, None).name == name


@pytest.mark.parametrize("model", ["seven", "-1", "1.5", " 1", "٣"])
def test_a_bad_seed_is_named(model: str) -> None:
    """A seed that is no whole number is a ConfigError with the value in it."""
    with pytest.raises(ConfigError) as caught:
        RANDOM_DRAFT.load(model, None)
    assert repr(model) in str(caught.value)


def test_an_address_is_refused() -> None:
    """There is nothing to reach by an address."""
    with pytest.raises(ConfigError, match="http://host"):
        RANDOM_DRAFT.load("", "http://host")


def test_a_bad_seed_given_in_python_is_named() -> None:
    """The constructor checks its seed too."""
    with pytest.raises(ConfigError, match="seed is -1"):
        RandomDraft(-1)


def test_it_is_registered() -> None:
    """`open_draft` finds it by its name."""
    assert open_draft("random:4").name == "random:4"
