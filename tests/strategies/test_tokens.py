"""`tokens`: whatever a draft does, the caller gets the target's plain answer, and is told."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llm_spec import (
    ChatRequest,
    Fallback,
    Fixed,
    ProviderDraft,
    ReferenceDraft,
    Round,
    SpeculativeConfig,
    SpeculativeDecoder,
    SpeculativeFinish,
    SpeculativeResult,
    TextDelta,
    UnsupportedError,
)
from llm_spec.contract.draft import DraftPiece
from llm_spec.contract.token_model import DraftToken, PassCosts, TokenDraft, TokenModel, TokenSampler
from llm_spec.decoder.choice import StrategyPlanner, choose_strategy
from llm_spec.decoder.feature_discovery import FeatureDiscovery
from llm_spec.local.acceptance_name import AcceptanceName
from llm_spec.local.answer import generate_events
from llm_spec.local.lookahead import CostAware, LookaheadController, LookaheadPolicy, RoundFeedback
from llm_spec.strategies.base import StrategyContext
from llm_spec.testing import CharTokenizer, LocalProvider, RandomDraft, TableModel

STORY = "once upon a time, in a café, a quick brown fox jumped over 3 lazy dogs."
Propose = Callable[[Sequence[int]], Iterator[DraftToken]]


class FaultyDraft:
    """A token draft that does what its functions do; counts what is opened and closed."""

    name = "faulty"

    def __init__(
        self,
        propose: Propose,
        *,
        at_open: Callable[[], None] = lambda: None,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._propose = propose
        self._at_open = at_open
        self._at_close = at_close
        self.num_opened = self.num_closed = self.num_proposals = 0

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:  # noqa: ARG002 - only asked for tokens
        raise NotImplementedError
        yield

    async def aclose(self) -> None:
        """Nothing to release."""

    def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - it would try any target
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:  # noqa: ARG002
        self._at_open()
        self.num_opened += 1
        if isinstance(prompt_ids, list):
            prompt_ids.append(35)  # what a draft does with a list that it is given must not matter
        return self

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self.num_proposals += 1
        return self._propose(context_ids)

    def close(self) -> None:
        self.num_closed += 1
        self._at_close()


def truth(context_ids: Sequence[int]) -> Iterator[DraftToken]:
    """The story's own bytes from where the answer stands."""
    answered = bytes(context_ids[context_ids.index(257) + 1 :])
    yield from map(DraftToken, STORY.encode()[len(answered) :])


def fails(error: BaseException | None) -> None:
    if error is not None:
        raise error


def raises_first(_: Sequence[int]) -> Iterator[DraftToken]:
    raise ConnectionError("draft is down")
    yield


def raises_at_once(_: Sequence[int]) -> Iterator[DraftToken]:
    raise ValueError("not even an iterator")


def raises_midway(context_ids: Sequence[int]) -> Iterator[DraftToken]:
    for index, token in enumerate(truth(context_ids)):
        fails(KeyError("midway") if index == 2 else None)
        yield token


def cancelled_midway(context_ids: Sequence[int]) -> Iterator[DraftToken]:
    for index, token in enumerate(truth(context_ids)):
        if index == 2:
            raise asyncio.CancelledError
        yield token


def changing(change: Callable[[Any], object]) -> Propose:
    """Right tokens, after a change to the list that the draft was given."""

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        change(context_ids)
        yield from truth(context_ids)

    return propose


def cleaning_up_badly(context_ids: Sequence[int]) -> Iterator[DraftToken]:
    try:
        yield from truth(context_ids)
    finally:
        fails(OSError("no cleaning up"))


def raises_later(context_ids: Sequence[int]) -> Iterator[DraftToken]:
    fails(OSError("later") if len(context_ids) > 30 else None)
    yield from truth(context_ids)


def yielding(*tokens: Any) -> Propose:
    """Right tokens and then these."""

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        right = truth(context_ids)
        yield from (token for token, _ in zip(right, range(2), strict=False))
        yield from tokens

    return propose


def slow(seconds: float, num_tokens: int) -> Propose:
    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        for _, token in zip(range(num_tokens), truth(context_ids), strict=False):
            time.sleep(seconds)
            yield token
        time.sleep(seconds)

    return propose


def with_law(probs: Any, token_id: int | None) -> Propose:
    """Tokens, the right ones or always one, that claim to be drawn from something that is no law."""

    def propose(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        for token in truth(context_ids):
            yield token._replace(probs=probs, token_id=token.token_id if token_id is None else token_id)

    return propose


FAILURES: dict[str, Callable[[], FaultyDraft]] = {
    "raises at open": lambda: FaultyDraft(truth, at_open=lambda: fails(RuntimeError("no memory"))),
    "raises at the first proposal": lambda: FaultyDraft(raises_first),
    "raises instead of an iterator": lambda: FaultyDraft(raises_at_once),
    "raises midway": lambda: FaultyDraft(raises_midway),
    "raises in a later round": lambda: FaultyDraft(raises_later),
    "id -1": lambda: FaultyDraft(yielding(DraftToken(-1))),
    "id vocab_size": lambda: FaultyDraft(yielding(DraftToken(258))),
    "id far outside": lambda: FaultyDraft(yielding(DraftToken(2**70))),
    "id no integer": lambda: FaultyDraft(yielding(DraftToken(1.5))),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - garbage on purpose
    "id no number": lambda: FaultyDraft(yielding(DraftToken("a"))),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - garbage on purpose
    "no token": lambda: FaultyDraft(yielding(None)),
    "confidence no number": lambda: FaultyDraft(yielding(DraftToken(1, "sure"))),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - garbage on purpose
    "confidence NaN": lambda: FaultyDraft(yielding(DraftToken(1, math.nan))),
    "confidence above 1": lambda: FaultyDraft(yielding(DraftToken(1, 1.5))),
    "law no array": lambda: FaultyDraft(yielding(DraftToken(1, 0.5, [1.0]))),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - garbage on purpose
    "no iterator": lambda: FaultyDraft(lambda _: None),  # type: ignore[arg-type,return-value]  # pyright: ignore[reportArgumentType] - garbage on purpose
    "appends to the context": lambda: FaultyDraft(changing(lambda ids: ids.append(35))),
    "changes the context": lambda: FaultyDraft(changing(lambda ids: ids.__setitem__(0, 35))),
    "deletes from the context": lambda: FaultyDraft(changing(lambda ids: ids.pop())),
    "cleans up badly": lambda: FaultyDraft(cleaning_up_badly),
    "cancelled at open": lambda: FaultyDraft(truth, at_open=lambda: fails(asyncio.CancelledError())),
    "cancelled midway": lambda: FaultyDraft(cancelled_midway),
    "cancelled at close": lambda: FaultyDraft(truth, at_close=lambda: fails(asyncio.CancelledError())),
    "slow tokens": lambda: FaultyDraft(slow(0.06, 8)),
    "slow and then nothing": lambda: FaultyDraft(slow(0.06, 0)),
    "cannot close": lambda: FaultyDraft(truth, at_close=lambda: fails(OSError("still busy"))),
    "cannot close either": lambda: FaultyDraft(raises_midway, at_close=lambda: fails(OSError("still busy"))),
}


async def decode(
    draft: Any, *, lookahead: LookaheadPolicy | None = None, target: TableModel | None = None, **options: Any
) -> SpeculativeResult:
    acceptance: AcceptanceName = options.pop("acceptance", "coupled")
    timeout_s: float = options.pop("draft_timeout_s", 30.0)
    config = SpeculativeConfig(
        strategy="tokens", lookahead=lookahead or Fixed(4), draft_timeout_s=timeout_s, acceptance=acceptance
    )
    model = target or TableModel(STORY, order=16)
    decoder = SpeculativeDecoder(target=LocalProvider(model), draft=draft, config=config)
    result = await decoder.decode("tell", **options)
    assert model.num_open == 0
    return result


class DearDrafts:
    """A policy, and its own controller, that says a drafted token had cost ten plain steps."""

    def start(self) -> LookaheadController:
        return self

    def limit(self) -> int:
        return 4

    def wants_more(self, confidences: Sequence[float | None]) -> bool:
        return len(confidences) < 4

    def choose_num_verified(self, confidences: Sequence[float | None]) -> int:
        return len(confidences)

    def update(self, report: RoundFeedback) -> None:
        """Nothing is learned."""

    def describe(self) -> Mapping[str, float]:
        return {"plain_step_s": 1.0, "draft_token_s": 10.0, "verify_token_s": 0.1}

    def reset(self) -> None:
        """Nothing is to be forgotten."""


@pytest.mark.parametrize(("before", "num_drafted"), [(Fixed(4), 3), (DearDrafts(), 1)], ids=["unknown", "dear"])
async def test_a_request_begins_with_the_costs_of_earlier_ones(before: LookaheadPolicy, num_drafted: int) -> None:
    """A draft that was dear is given one token to show itself; the text is the same."""
    config = SpeculativeConfig(strategy="tokens", lookahead=before, baseline_every=0)
    first = SpeculativeDecoder(
        target=LocalProvider(TableModel(STORY, order=16)), draft=ReferenceDraft(STORY), config=config
    )
    await first.decode("tell")
    later = await first.with_config(replace(config, lookahead=CostAware())).decode("tell")
    assert (later.content, later.rounds[0].num_draft_tokens) == (STORY, num_drafted)


class TimedTable(TableModel):
    """A model that has found a pass of several tokens to take as long as fifty plain steps."""

    pass_costs = PassCosts(50.0, 0.0)


@pytest.mark.parametrize(("model", "is_drafted"), [(TableModel, True), (TimedTable, False)], ids=["unknown", "dear"])
async def test_the_first_request_begins_with_the_costs_that_the_target_has_measured(
    model: type[TableModel], is_drafted: bool
) -> None:
    """What verifying costs is then not found out at the expense of an answer."""
    config = SpeculativeConfig(strategy="tokens", baseline_every=0)
    decoder = SpeculativeDecoder(
        target=LocalProvider(model(STORY, order=16)), draft=ReferenceDraft(STORY), config=config
    )
    result = await decoder.decode("tell")
    assert (result.content, result.rounds[0].num_draft_tokens > 0) == (STORY, is_drafted)


class SharingTable(TableModel):
    """A model whose passes are joined with those of others: each bears fifty seconds of them, it says."""

    def open(self, *, exact: bool = True) -> Any:
        session: Any = super().open(exact=exact)
        session.forward_cost_s = 50.0
        return session


class KeepsCosts(DearDrafts):
    """A policy that keeps what verifying cost."""

    def __init__(self) -> None:
        self.verify_s: list[float] = []

    def update(self, report: RoundFeedback) -> None:
        self.verify_s.append(report.verify_s)


async def test_the_lookahead_weighs_what_a_request_bears_of_shared_passes() -> None:
    """Rounds report what they took by the clock."""
    policy = KeepsCosts()
    result = await decode(ReferenceDraft(STORY), lookahead=policy, target=SharingTable(STORY, order=16))
    assert len(policy.verify_s) == len(result.rounds) > 3
    assert all(50.0 <= verify_s < 51.0 for verify_s in policy.verify_s)
    assert result.timings.verify_s < 50.0


@pytest.mark.parametrize("lookahead", [Fixed(4), CostAware()], ids=["fixed", "cost"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failing_draft_means_plain_decoding(failure: str, lookahead: LookaheadPolicy) -> None:
    """The answer is the plain one; the failure is told once, counted, and the draft is closed and asked no more."""
    draft = FAILURES[failure]()
    target = SharingTable(STORY, order=16)  # whose passes cost what it says, so that drafting pays on any machine
    timeout_s = 0.05 if "slow" in failure else 30.0
    result = await decode(draft, lookahead=lookahead, draft_timeout_s=timeout_s, target=target)
    assert result.content == STORY
    assert (result.finish_reason, result.stopped_by) == ("stop", "eos")
    assert result.usage is not None
    assert result.usage.input_tokens == 5
    assert len(result.fallbacks) == 1
    assert result.fallbacks[0]
    assert "\n" not in result.fallbacks[0]
    assert result.stats.num_fallbacks == 1
    assert draft.num_closed == draft.num_opened <= 1


REASONS = {
    "raises at open": "RuntimeError: no memory",
    "raises midway": "KeyError: 'midway'",
    "id no integer": "DraftError: a drafted token's id is of type float; it must be a whole number",
    "no token": "DraftError: the draft proposed a value of type NoneType; it must be a DraftToken",
    "confidence no number": "DraftError: a drafted token's confidence is of type str; it must be a number from 0 to 1",
    "confidence NaN": "DraftError: a drafted token's confidence is nan; it must be from 0 to 1",
    "law no array": "DraftError: probs of token id 1 are of type list; they must be a numpy array",
    "no iterator": "TypeError: 'NoneType' object is not iterable",
    "appends to the context": "AttributeError: 'ReadOnlyTokenIds' object has no attribute 'append'",
    "changes the context": "AttributeError: 'ReadOnlyTokenIds' object has no attribute '__setitem__'",
    "cleans up badly": "OSError: no cleaning up",
    "cancelled at open": "CancelledError (raised by the draft; the request was not cancelled)",
    "cancelled midway": "CancelledError (raised by the draft; the request was not cancelled)",
    "cancelled at close": "CancelledError (raised by the draft's close)",
    "slow tokens": "DraftError: a proposal took longer than 0.05 s",
    "cannot close": "OSError: still busy (raised by the draft's close)",
    "cannot close either": "KeyError: 'midway'",
}


@pytest.mark.parametrize("failure", REASONS)
async def test_the_reason_names_what_was_wrong(failure: str) -> None:
    """In one line, beginning with the error's type; of several failures the first."""
    result = await decode(FAILURES[failure](), draft_timeout_s=0.05 if "slow" in failure else 30.0)
    assert result.fallbacks == (REASONS[failure],)


@pytest.mark.parametrize("when", ["open", "midway", "close"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_draft_passes(error: type[BaseException], when: str) -> None:
    """It is the process's own affair; caches are closed all the same."""

    def midway(_: Sequence[int]) -> Iterator[DraftToken]:
        raise error
        yield

    drafts = {
        "open": FaultyDraft(truth, at_open=lambda: fails(error())),
        "midway": FaultyDraft(midway),
        "close": FaultyDraft(truth, at_close=lambda: fails(error())),
    }
    target = TableModel(STORY, order=16)
    with pytest.raises(error):
        list(generate_events(target, ChatRequest.create("tell"), drafter=drafts[when]))
    assert target.num_open == 0


@pytest.mark.parametrize("strategy", ["auto", "tokens"])
async def test_a_draft_that_cannot_say_whether_it_can_draft(strategy: Any) -> None:
    """`auto` goes on without it; `tokens` says what it raised."""

    class Undecided(FaultyDraft):
        def token_draft_refusal(self, target: TokenModel) -> str | None:  # noqa: ARG002 - never
            raise LookupError("no idea")

    config = SpeculativeConfig(strategy=strategy)
    decoder = SpeculativeDecoder(
        target=LocalProvider(TableModel(STORY, order=16)), draft=Undecided(truth), config=config
    )
    if strategy == "auto":
        assert (await decoder.decode("tell")).content == STORY
    else:
        with pytest.raises(UnsupportedError, match="draft faulty failed: LookupError: no idea"):
            await decoder.decode("tell")
    target = TableModel(STORY, order=16)
    events = [
        event
        for batch in generate_events(target, ChatRequest.create("tell"), drafter=Undecided(truth))
        for event in batch
    ]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == STORY


@pytest.mark.parametrize("failure", ["raises at open", "raises midway", "id -1", "raises in a later round"])
async def test_a_failing_draft_is_told_where_it_failed(failure: str) -> None:
    """One Fallback event comes beside the round in which the draft failed; from there every round is plain.

    That round still verifies what was drafted before the failure.
    """
    config = SpeculativeConfig(strategy="tokens", lookahead=Fixed(4))
    decoder = SpeculativeDecoder(
        target=LocalProvider(TableModel(STORY, order=16)), draft=FAILURES[failure](), config=config
    )
    async with decoder.stream("tell", rounds=True) as events:
        seen = [event async for event in events]
    at = [index for index, event in enumerate(seen) if isinstance(event, Fallback)]
    assert len(at) == 1
    assert all(event.num_draft_tokens == 0 for event in seen[at[0] :] if isinstance(event, Round))
    drafted_before = [event.num_draft_tokens for event in seen[: at[0]] if isinstance(event, Round)]
    assert any(drafted_before) == (failure != "raises at open")
    assert isinstance(seen[-1], SpeculativeFinish)


async def test_a_failing_draft_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its failure is a warning, with the reason."""
    with caplog.at_level(logging.WARNING, "llm_spec"):
        await decode(FAILURES["id vocab_size"]())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "258" in caplog.text


async def test_a_draft_that_is_empty_forever_is_no_failure() -> None:
    """It has nothing to say: every round is plain, and nothing is told."""
    draft = FaultyDraft(lambda _: iter(()))
    result = await decode(draft)
    assert result.content == STORY
    assert result.fallbacks == ()
    assert result.stats.num_spec_steps == 0
    assert draft.num_closed == draft.num_opened == 1


async def test_nan_logits_of_a_drafting_model_are_its_own_trouble() -> None:
    """A draft model that computes NaN is given up; the target answers."""
    model = TableModel(STORY, order=16, nan_at=range(20, 10_000))
    for temperature in (0.0, 0.7):
        for acceptance in ("coupled", "rejection", "lossy_typical"):
            draft = ProviderDraft(LocalProvider(model))
            result = await decode(draft, temperature=temperature, seed=3, acceptance=acceptance, max_tokens=60)
            assert len(result.fallbacks) == 1
            assert "NaN" in result.fallbacks[0]
            assert model.num_open == 0


@pytest.mark.parametrize("fault", ["prompt", "later", "window"])
async def test_a_drafting_model_that_breaks_is_given_up(fault: str) -> None:
    """Reading the prompt, later on, or a prompt beyond its window: the answer is the target's, caches are closed."""
    model = TableModel(STORY, order=16, context_length=3 if fault == "window" else 4096)
    model.fail_at = {"prompt": {1: OSError("gone")}, "later": {25: OSError("gone")}, "window": {}}[fault]
    result = await decode(ProviderDraft(LocalProvider(model)))
    assert result.content == STORY
    assert len(result.fallbacks) == 1
    assert model.num_open == 0


@pytest.mark.parametrize("token_id", [None, 120], ids=["right token", "wrong token"])
@pytest.mark.parametrize(
    "probs",
    [np.array([0.5, 0.5]), np.full(258, math.nan), np.full(258, -1.0), np.zeros(258), "probs"],
    ids=["wrong length", "NaN", "negative", "zeros", "no array"],
)
async def test_a_draft_whose_law_is_no_law_means_plain_decoding(probs: Any, token_id: int | None) -> None:
    """Under rejection sampling a garbled law is the draft's fault: no error, and no token that the target cannot say.

    A token of probability 0 under its own law was not drawn from it.
    """
    draft = FaultyDraft(with_law(probs, token_id))
    target = TableModel(STORY, order=16)
    result = await decode(draft, target=target, acceptance="rejection", temperature=0.7, top_k=1, seed=1)
    assert result.content == STORY  # top_k=1 leaves one text
    assert len(result.fallbacks) == 1


async def test_guesses_beyond_what_fits_are_not_asked_for() -> None:
    """An endless draft is stopped by the lookahead, and its generator is closed."""
    closed: list[bool] = []

    def endless(context_ids: Sequence[int]) -> Iterator[DraftToken]:
        try:
            while True:
                yield from truth(context_ids)
        finally:
            closed.append(True)

    result = await decode(FaultyDraft(endless))
    assert result.content == STORY
    assert len(closed) == result.stats.num_spec_steps


async def test_the_result_tells_what_is_promised() -> None:
    """Exact and the same text for coupled, exact alone for rejection, lossy for the rule that has it in its name."""
    told: dict[str, tuple[str, bool]] = {}
    for acceptance in ("coupled", "rejection", "lossy_typical"):
        result = await decode(RandomDraft(), acceptance=acceptance, temperature=1.0, seed=1, max_tokens=5)
        told[acceptance] = (result.guarantee, result.same_text)
    assert told == {"coupled": ("exact", True), "rejection": ("exact", False), "lossy_typical": ("lossy", False)}


async def test_a_model_that_cannot_show_equal_rows_promises_no_same_text() -> None:
    """Where logits depend on the width, the result does not claim the text of plain decoding."""
    target = TableModel(STORY, order=16)
    target.same_text = False
    assert not (await decode(RandomDraft(), target=target)).same_text


@pytest.mark.parametrize("same", ["fingerprint", "size"])
async def test_mismatched_vocabularies_are_refused_with_the_reason(same: str) -> None:
    """Other ids for the same text, or another number of them: the refusal names both models."""
    target = LocalProvider(TableModel(name="table:target", tokenizer=CharTokenizer("abc")))
    tokenizer = CharTokenizer("abd" if same == "size" else "abc")
    extra = 0 if same == "size" else 7
    draft = ProviderDraft(
        LocalProvider(TableModel(name="table:draft", tokenizer=tokenizer, vocab_size=tokenizer.num_ids + extra))
    )
    config = SpeculativeConfig(strategy="auto")
    request = ChatRequest.create("abc")
    if same == "size":
        planner = StrategyPlanner()
        context = StrategyContext(
            draft=draft, target=target, request=request, limits=config, pair_stats=planner.pair_stats
        )
        choice = await choose_strategy(context, config.strategy, planner, discovery=FeatureDiscovery(target))
        assert (choice.strategy.name, choice.plain_reason) == ("plain", "target")
        reason = draft.token_draft_refusal(target.model)
        assert reason is not None
        assert "table:draft" in reason
        assert "table:target" in reason
        assert "\n" not in reason
    else:  # the same tokenizer, padded differently (vLLM #10913): serving or refusing are both right, failing is not
        result = await SpeculativeDecoder(target=target, draft=draft, config=config).decode("abc", max_tokens=5)
        assert result.fallbacks == ()


async def test_a_target_that_verifies_no_token_faster_than_it_writes_one_is_left_alone() -> None:
    """It reads one token a pass: a draft could only cost; and the result says why nothing was drafted."""
    target = LocalProvider(TableModel(max_width=1))
    result = await SpeculativeDecoder(target=target, draft=RandomDraft(0)).decode("p", max_tokens=8)
    assert (result.strategy, result.stats.num_draft_tokens) == ("plain", 0)
    assert result.plain_detail == "target table:model verifies no token faster than it writes one"
