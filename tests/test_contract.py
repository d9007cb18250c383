"""The contract is declared: what a draft can do is in its capabilities, and the core asks nothing else."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import llm_spec
from llm_spec import (
    CascadeDraft,
    ChatRequest,
    ConcurrencyLimit,
    DraftProvider,
    PromptLookup,
    ProviderDraft,
    ReferenceDraft,
)
from llm_spec.contract.draft import DraftCapabilities, DraftPiece, get_draft_capabilities
from llm_spec.contract.provider import Capabilities
from llm_spec.decoder.breaker import CircuitBreaker, GuardedDraft
from llm_spec.decoder.metered import MeteredDraft
from llm_spec.decoder.metering import TokenMeter
from llm_spec.testing import CharTokenizer, LocalProvider, TableModel

SOURCE = Path(llm_spec.__file__).parent
DRAFT_CLASSES = {"CascadeDraft", "GuardedDraft", "MeteredDraft", "PromptLookup", "ProviderDraft", "ReferenceDraft"}
DRAFT_CLASSES |= {"CopyDraft", "SuffixDraft"}


class Plain:
    """A draft with the three members that every draft has."""

    name = "plain"

    def draft(self, request: ChatRequest, max_tokens: int) -> AbstractAsyncContextManager[AsyncIterator[DraftPiece]]:
        raise NotImplementedError

    async def aclose(self) -> None: ...


def local_draft() -> ProviderDraft:
    return ProviderDraft(LocalProvider(TableModel(tokenizer=CharTokenizer("xy"))))


def core_files() -> Iterator[Path]:
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in ("integrations", "testing"):
            yield path


def calls_in_core(function: str) -> Iterator[tuple[Path, ast.Call]]:
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                yield path, node


def test_a_draft_needs_no_capabilities() -> None:
    """Three members are enough: such a draft continues a prefix, by a model that others run."""
    assert get_draft_capabilities(Plain()) == DraftCapabilities(
        continues_prefix=True, is_free=False, drafts=(), token_model=None, companion=None
    )


def test_an_attribute_of_another_kind_is_not_a_drafts_capabilities() -> None:
    """A provider that drafts as well has the capabilities of a provider."""
    plain = Plain()
    plain.capabilities = Capabilities(continue_prefix=True)  # type: ignore[attr-defined]
    assert get_draft_capabilities(plain) == DraftCapabilities()


def cascade() -> CascadeDraft:
    return CascadeDraft(PromptLookup(), local_draft())


@pytest.mark.parametrize("make", [PromptLookup, local_draft, Plain, cascade])
def test_wrapped_drafts_keep_their_capabilities(make: Callable[[], DraftProvider]) -> None:
    """What counts or guards a draft passes its capabilities on whole."""
    draft = make()
    metered = MeteredDraft(draft, TokenMeter(ChatRequest.create("q")))
    guarded = GuardedDraft(draft, CircuitBreaker("d"), ConcurrencyLimit(1), 30.0)
    for wrapped in (metered, guarded, MeteredDraft(guarded, TokenMeter(ChatRequest.create("q")))):
        assert comparable(get_draft_capabilities(wrapped)) == comparable(get_draft_capabilities(draft))


def comparable(can: DraftCapabilities) -> tuple[object, ...]:
    companion = None if can.companion is None else type(can.companion)  # one is made for each look
    return can.continues_prefix, can.is_free, can.drafts, can.token_model, companion


def test_a_cascade_has_the_model_of_its_last_draft() -> None:
    """A target may run that model, and the drafts before it are its companion."""
    last = local_draft()
    can = get_draft_capabilities(CascadeDraft(PromptLookup(), ReferenceDraft("x"), last))
    assert can.token_model is get_draft_capabilities(last).token_model is not None
    assert isinstance(can.companion, CascadeDraft)
    assert can.companion.name == "lookup+given-text"
    assert get_draft_capabilities(CascadeDraft(last, local_draft(), PromptLookup())).token_model is not None
    assert get_draft_capabilities(CascadeDraft(ReferenceDraft("x"), PromptLookup())).token_model is None


def test_a_metered_draft_proposes_ids_where_its_draft_does() -> None:
    """Where it does not, the refusal names it."""
    target, meter = TableModel(tokenizer=CharTokenizer("xy")), TokenMeter(ChatRequest.create("q"))
    assert MeteredDraft(PromptLookup(), meter).token_draft_refusal(target) is None
    assert MeteredDraft(Plain(), meter).token_draft_refusal(target) == "draft plain gives text, not token ids"


def test_the_core_knows_no_draft_by_its_class() -> None:
    """A draft of anybody's can do what those of this package can."""
    found = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path, call in calls_in_core("isinstance")
        if DRAFT_CLASSES & {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
    ]
    assert found == []


def test_the_core_looks_for_no_attribute_of_a_draft_but_capabilities() -> None:
    """Nor for one of a tokenizer: what is optional is a protocol or a capability."""
    found = {
        (str(path.relative_to(SOURCE)), call.args[1].value)
        for path, call in calls_in_core("getattr")
        if len(call.args) > 2 and isinstance(call.args[1], ast.Constant)  # with a default
    }
    # a lookahead is only validated
    assert found == {("contract/draft.py", "capabilities"), ("strategies/limits.py", "start")}


def test_product_code_imports_nothing_made_for_tests() -> None:
    """`llm_spec.testing` is built on the product, not the other way round."""
    found = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("testing", "cli")  # `llm-spec plan` simulates
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llm_spec.testing"))
        or (isinstance(node, ast.Import) and any(name.name.startswith("llm_spec.testing") for name in node.names))
    ]
    assert found == []
