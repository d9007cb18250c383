"""Providers as drafts, by token and by piece of text."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from support.draft_checks import PROMPT, TARGET, choose, pieces_of

from llm_spec import ChatRequest, DraftError, Finish, ProviderDraft, ReasoningDelta, StreamEvent, TextDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.testing import CharTokenizer, LocalProvider, ScriptedProvider, TableModel

# -------------------------------------------------------------------------------------------- providers


async def test_a_provider_drafts_its_answer() -> None:
    """Piece by piece as it comes, with finish reason and usage at the end."""
    provider = ScriptedProvider("one two three", usage=Usage(output_tokens=3))
    pieces = await pieces_of(ProviderDraft(provider), ChatRequest.create("count"))
    assert [piece.text for piece in pieces] == ["one", " two", " three", ""]
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].usage == Usage(output_tokens=3)
    assert provider.num_open == 0


async def test_a_draft_gets_no_tools_and_no_more_than_it_may_write() -> None:
    """Tools are the target's business; the cap is the draft's own; the conversation is unchanged."""
    provider = ScriptedProvider("one two three")
    request = ChatRequest.create("count", tools=[{"type": "function"}], tool_choice="auto", max_tokens=50)
    await pieces_of(ProviderDraft(provider), request, 2)
    asked = provider.requests[0]
    assert (asked.tools, asked.tool_choice, asked.max_tokens) == ((), None, 2)
    assert asked.messages == request.messages


@pytest.mark.parametrize("can", [True, False])
async def test_a_prefix_goes_only_to_drafts_that_can_continue_it(can: bool) -> None:
    """Others answer from the start."""
    provider = ScriptedProvider("one two", capabilities=Capabilities(continue_prefix=can))
    pieces = await pieces_of(ProviderDraft(provider), ChatRequest.create("count", prefix="one"))
    assert provider.requests[0].prefix == ("one" if can else "")
    assert "".join(piece.text for piece in pieces) == (" two" if can else "one two")


async def test_leaving_a_draft_closes_its_stream() -> None:
    """Whoever opened it closes it, also halfway."""
    provider = ScriptedProvider("one two three")
    async with ProviderDraft(provider).draft(ChatRequest.create("count"), 10) as pieces:
        await anext(pieces)
        assert provider.num_open == 1
    assert provider.num_open == 0


async def test_a_provider_that_can_tell_token_ids_is_asked_for_them() -> None:
    """Those of a text that comes later as well: half a character has none."""

    class Telling(ScriptedProvider):
        def stream_with_token_ids(self, request: ChatRequest) -> Any:
            return super().stream(replace(request, extra={"ids": True}))

    def tell(request: ChatRequest) -> list[StreamEvent]:
        asks = "ids" in request.extra
        pieces = [("", (1,)), ("é", (2,)), ("!", (3, 4))]
        return [*(TextDelta(text, token_ids=ids if asks else None) for text, ids in pieces), Finish("stop")]

    given = await pieces_of(ProviderDraft(Telling(tell)), ChatRequest.create("q"))
    assert [(piece.text, piece.token_ids) for piece in given] == [("é", (1, 2)), ("!", (3, 4)), ("", None)]
    others = await pieces_of(ProviderDraft(ScriptedProvider(tell)), ChatRequest.create("q"))
    assert [(piece.text, piece.token_ids) for piece in others] == [("é", None), ("!", None), ("", None)]


async def test_ids_of_no_text_are_not_taken_for_a_texts() -> None:
    """Those of reasoning, and of the answer's end, which is no token that was drafted."""
    events = [ReasoningDelta("hm"), TextDelta("", token_ids=(7,)), TextDelta(" a", token_ids=(1,))]
    events += [TextDelta(" b", token_ids=(2,)), TextDelta("", token_ids=(9,)), Finish("stop")]
    pieces = await pieces_of(ProviderDraft(ScriptedProvider(events)), ChatRequest.create("q"))
    assert [(piece.text, piece.token_ids) for piece in pieces] == [(" a", None), (" b", (2,)), ("", None)]


async def test_a_draft_is_not_asked_for_log_probabilities() -> None:
    """Those of a request are the target's."""
    provider = ScriptedProvider("one two")
    await pieces_of(ProviderDraft(provider), ChatRequest.create("q", top_logprobs=2))
    assert [request.top_logprobs for request in provider.requests] == [None]


class CountingModel(TableModel):
    """Notes how its sessions are opened."""

    def __init__(self, **options: Any) -> None:
        super().__init__("abcdefgh", **options)
        self.opened: list[bool] = []
        self.most_open = 0
        self.has_two = threading.Event()

    def open(self, *, exact: bool = True) -> Any:
        session = super().open(exact=exact)
        self.opened.append(exact)
        self.most_open = max(self.most_open, self.num_open)
        if self.num_open == 2:
            self.has_two.set()
        return session


async def test_the_rows_of_a_model_in_this_process_need_not_be_exact() -> None:
    """Only as a target's: what it drafts is verified, and it may go on with any cache."""
    model = CountingModel()
    provider = LocalProvider(model)
    pieces = await pieces_of(ProviderDraft(provider), ChatRequest.create("q", temperature=0), 20)
    assert "".join(piece.text for piece in pieces) == "abcdefgh"
    assert (await provider.complete(ChatRequest.create("q", temperature=0))).content == "abcdefgh"
    assert model.opened == [False, True]
    assert model.num_open == 0


async def test_a_draft_reads_its_prompt_in_small_pieces_where_that_is_slow() -> None:
    """So that it can be left; a target reads it in pieces of one size."""
    model = TableModel("abc", forward_s=1.0, sleep=lambda _: time.sleep(0.026))
    provider, request = LocalProvider(model), ChatRequest.create("q" * 100, temperature=0)
    await pieces_of(ProviderDraft(provider), request, 2)
    assert model.widths[:3] == [16, 32, 32]
    model.widths.clear()
    await provider.complete(request)
    assert model.widths[0] >= 100


@pytest.mark.parametrize(("is_for_request", "most_open"), [(True, 1), (False, 2)])
async def test_the_next_call_of_a_request_waits_for_the_one_before(is_for_request: bool, most_open: int) -> None:
    """Which is left within a forward pass: its cache is free then, and holds the prompt. Others' calls do not wait."""
    in_pass, may_go_on = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        in_pass.set()
        may_go_on.wait(10)

    model = CountingModel(forward_s=1.0, sleep=wait)
    draft = ProviderDraft(LocalProvider(model))
    used = draft.for_request() if is_for_request else draft
    request = ChatRequest.create("q", temperature=0)
    first = asyncio.create_task(pieces_of(used, request))
    await asyncio.to_thread(in_pass.wait, 10)
    first.cancel()
    second = asyncio.create_task(pieces_of(used, request))
    async with asyncio.timeout(10):
        if not is_for_request:
            await asyncio.to_thread(model.has_two.wait, 10)
        await asyncio.sleep(0.01)
        may_go_on.set()
        assert "".join(piece.text for piece in await second) == "abcdefgh"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (model.most_open, model.num_open) == (most_open, 0)


def test_a_provider_of_another_process_is_the_draft_of_every_request() -> None:
    draft = ProviderDraft(ScriptedProvider("x"))
    assert draft.for_request() is draft


def test_a_drafting_model_follows_corrections() -> None:
    """Its cache keeps what the target confirmed and forgets the rest: proposals are those of a fresh cache."""
    model = TableModel(seed=5)
    draft = ProviderDraft(LocalProvider(model)).open_token_draft(TARGET, choose, PROMPT)
    for answer in ([], [65], [65, 66, 67], [65, 70], [65, 70, 71, 72]):
        context = [*PROMPT, *answer]
        expected: list[int] = []
        for _ in range(4):
            expected.append(int(model.logits([*context, *expected]).argmax()))
        assert [t.token_id for t in itertools.islice(draft.propose(context), 4)] == expected
    draft.close()
    assert model.num_open == 0


def test_a_drafting_model_reads_only_what_is_new() -> None:
    """After a fully accepted round it reads the new tokens, not the prompt again."""
    model = TableModel(seed=5)
    draft = ProviderDraft(LocalProvider(model)).open_token_draft(TARGET, choose, PROMPT)
    answer = [token.token_id for token in itertools.islice(draft.propose(PROMPT), 4)]
    model.widths.clear()
    next(draft.propose([*PROMPT, *answer, 65]))
    assert model.widths == [2]  # the last drafted token, which it had not read, and the bonus
    draft.close()


def test_a_drafting_model_reads_what_it_has_missed_in_pieces() -> None:
    """After a pause it proposes what a fresh cache would, and no pass is wide."""
    model = TableModel(seed=5)
    draft = ProviderDraft(LocalProvider(model)).open_token_draft(TARGET, choose, PROMPT)
    missed = [65 + number % 20 for number in range(150)]
    model.widths.clear()
    for answer in ([65], missed, [*missed, 70]):
        proposed = next(draft.propose([*PROMPT, *answer])).token_id
        assert proposed == int(model.logits([*PROMPT, *answer]).argmax())
    assert max(model.widths) <= 64
    assert sum(model.widths) == len(missed) + 2  # the prompt's last token, too
    draft.close()


def test_a_drafting_model_of_another_vocabulary_is_refused() -> None:
    """By its refusal, and if opened all the same by an error."""
    draft = ProviderDraft(LocalProvider(TableModel(name="table:draft", tokenizer=CharTokenizer("ab"))))
    assert "table:draft" in str(draft.token_draft_refusal(TARGET))
    with pytest.raises(DraftError):
        draft.open_token_draft(TARGET, choose, PROMPT)
