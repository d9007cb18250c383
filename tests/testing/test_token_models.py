"""The table model: logits from the last tokens alone, faults when switched on, sessions counted."""

from __future__ import annotations

import asyncio
from contextlib import closing

import numpy as np
import pytest

from llm_spec import (
    ChatRequest,
    Fixed,
    InvalidRequestError,
    LlmProvider,
    ModelOutputError,
    ProviderDraft,
    SpeculativeConfig,
    SpeculativeDecoder,
    TargetError,
)
from llm_spec.testing import ByteTokenizer, CharTokenizer, LocalProvider, RandomDraft, TableModel, VirtualClockEventLoop

TEXT = "naïve café: 日本語 😀 is what it says, and then it ends."


async def test_it_answers_with_its_text() -> None:
    """Greedily a model gives the text it was made of, characters of several tokens included, and then EOS."""
    response = await LocalProvider(TableModel(TEXT)).complete(ChatRequest.create("anything"))
    assert response.content == TEXT
    assert response.stopped_by == "eos"
    assert response.usage is not None
    assert response.usage.output_tokens == len(TEXT.encode()) + 1


async def test_a_prefix_is_continued() -> None:
    """The answer goes on behind `prefix`."""
    response = await LocalProvider(TableModel(TEXT)).complete(ChatRequest.create("x", prefix=TEXT[:20]))
    assert response.content == TEXT[20:]


async def test_one_seed_gives_one_text_whatever_is_drafted() -> None:
    """Sampling from noise with a useless or a related draft gives what the target alone gives."""
    target = LocalProvider(TableModel(seed=1))
    drafts = [None, RandomDraft(5), ProviderDraft(LocalProvider(TableModel(seed=1, order=3)))]
    config = SpeculativeConfig(lookahead=Fixed(3))
    answers = {
        (
            await SpeculativeDecoder(target=target, draft=draft, config=config).decode(
                "x", temperature=0.9, seed=3, max_tokens=60
            )
        ).content
        for draft in drafts
    }
    assert len(answers) == 1


def test_logits_depend_on_the_last_tokens_alone() -> None:
    """Contexts that end in the same `order` tokens have the same logits; others, or other seeds, do not."""
    model = TableModel(order=2)
    assert np.array_equal(model.logits([1, 2, 3]), model.logits([9, 2, 3]))
    assert not np.array_equal(model.logits([1, 2, 3]), model.logits([1, 9, 3]))
    assert not np.array_equal(model.logits([1, 2, 3]), TableModel(order=2, seed=1).logits([1, 2, 3]))


def test_vocabulary_may_exceed_the_tokenizer() -> None:
    """Further ids have logits and no text; fewer than the tokenizer's are refused."""
    model = TableModel(vocab_size=300)
    assert model.logits([1]).shape == (300,)
    assert model.tokenizer.decode([72, 299, 105]) == "Hi"
    with pytest.raises(ValueError, match="vocab_size is 10"):
        TableModel(vocab_size=10)


def test_small_vocabularies_have_an_alphabet() -> None:
    """A character tokenizer has one id per letter and two more, and refuses other characters."""
    tokenizer = CharTokenizer("abc")
    model = TableModel("cab", tokenizer=tokenizer)
    assert model.vocab_size == 5
    assert tokenizer.decode(tokenizer.encode("abcba")) == "abcba"
    with pytest.raises(InvalidRequestError, match="'x' is not in the alphabet"):
        tokenizer.encode("ax")


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    """Undecodable bytes become U+FFFD, control tokens nothing."""
    assert ByteTokenizer().decode([0xC3, ByteTokenizer.eos_token_id]) == "\N{REPLACEMENT CHARACTER}"


def test_earlier_logits_are_not_valid_after_the_next_call() -> None:
    """Whoever keeps logits longer than promised finds NaN in them."""
    with closing(TableModel().open()) as session:
        kept = session.forward([1], num_rows=1)
        session.forward([2], num_rows=1)
        assert np.isnan(kept).all()


@pytest.mark.parametrize(
    ("token_ids", "num_rows"), [([], 0), ([1], 2), ([1, 2], 0), ([1] * 5, 2), ([1] * 9, 1), ([258], 1), ([-1], 1)]
)
def test_a_forward_out_of_range_is_refused(token_ids: list[int], num_rows: int) -> None:
    """Wrong widths, row counts and ids are errors of the caller's, not numbers."""
    with closing(TableModel(max_width=4, context_length=8).open()) as session, pytest.raises(ValueError, match=r"\d"):
        session.forward(token_ids, num_rows=num_rows)


def test_a_closed_session_and_a_wrong_length_are_refused() -> None:
    """A session does not work after `close`, nor forget more than it has."""
    session = TableModel().open()
    with pytest.raises(ValueError, match="length is 1"):
        session.truncate(1)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.forward([1], num_rows=1)


def test_it_counts_sessions_and_widths() -> None:
    """Sessions and forwards are counted."""
    model = TableModel()
    with closing(model.open()) as session:
        session.forward([1, 2, 3], num_rows=1)
        assert (model.num_open, model.num_closed, model.widths) == (1, 0, [3])
    session.close()
    assert (model.num_open, model.num_closed) == (0, 1)


async def test_nan_ends_an_answer_with_what_came_before() -> None:
    """NaN logits are a ModelOutputError; the text before them is reported."""
    prompt_length = len("x") + 1
    model = TableModel("hello", nan_at={prompt_length + 1})
    with pytest.raises(ModelOutputError) as caught:
        await SpeculativeDecoder(target=LocalProvider(model), draft=None).decode("x")
    assert caught.value.partial_text == "he"
    assert model.num_open == 0


async def test_a_failing_forward_fails_the_answer() -> None:
    """An exception of `forward` comes out as a TargetError, with the session closed."""
    model = TableModel("hello", fail_at={3: MemoryError("full")})
    with pytest.raises(TargetError, match="full"):
        await SpeculativeDecoder(target=LocalProvider(model), draft=None).decode("x")
    assert model.num_open == 0


@pytest.mark.virtual_clock
async def test_a_slow_forward_meets_a_deadline() -> None:
    """`forward_s` makes an answer slow enough for a deadline to cut it, by the virtual clock if it sleeps by that."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    config = SpeculativeConfig(deadline_s=3500.0)
    model = TableModel(forward_s=1000.0, sleep=loop.sleep_in_thread)
    result = await SpeculativeDecoder(target=LocalProvider(model), draft=None, config=config).decode("x")
    assert result.stopped_by == "deadline"
    assert model.num_open == 0


async def test_it_is_a_provider_with_a_token_model() -> None:
    """`LocalProvider` fits the protocol, offers its model, and leaves it to its maker."""
    model = TableModel()
    provider = LocalProvider(model)
    assert isinstance(provider, LlmProvider)
    assert provider.capabilities.token_model is model
    assert provider.capabilities.context_length == model.context_length
    await provider.aclose()
