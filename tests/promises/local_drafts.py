"""Drafts of token ids for a model in this process, and such as break their contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from llm_spec import CascadeDraft, DraftProvider, LlmProvider, PromptLookup, ReferenceDraft, SuffixDraft
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.testing import LocalProvider, TableModel
from promises.drafts import spoil_words

__all__ = ["LOCAL_DRAFTS", "ODD_TOKENS", "LocalDraftKind", "make_local_draft"]

LocalDraftKind: TypeAlias = Literal["none", "same model", "other model", "lookup", "suffix", "given", "joined", "odd"]
LOCAL_DRAFTS: Final[tuple[LocalDraftKind, ...]] = (
    *("none", "same model", "other model", "lookup", "suffix", "given", "joined", "odd"),
)
_FLOAT: Final = cast("int", 35.0)
# Tokens that break the contract.
_ODD_TOKENS: Final[Mapping[str, Callable[[DraftToken], Any]]] = {
    "confidence is a text": lambda token: DraftToken(token.token_id, cast("float", "sure")),
    "confidence is nan": lambda token: DraftToken(token.token_id, float("nan")),
    "token id is a float": lambda _: DraftToken(_FLOAT),
    "token id is too big": lambda _: DraftToken(10**6),
    "token id is negative": lambda _: DraftToken(-1),
    "law is a list": lambda token: DraftToken(token.token_id, 0.9, cast("Any", [1.0])),
    "gives None": lambda _: None,
}
ODD_TOKENS: Final = (
    *_ODD_TOKENS,
    *("appends to the context", "raises CancelledError", "raises", "raises at opening", "close raises"),
)


class OddTokens(ReferenceDraft):
    """A draft of token ids that breaks its contract at the token of index `at`."""

    def __init__(self, text: str, odd: str, at: int) -> None:
        super().__init__(text)
        self.name = f"odd: {odd}"
        self._odd = odd
        self._at = at

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        if self._odd == "raises at opening":
            raise RuntimeError("a bug")
        return _OddTokenDraft(super().open_token_draft(target, choose, prompt_ids), self._odd, self._at)


class _OddTokenDraft:
    def __init__(self, inner: TokenDraft, odd: str, at: int) -> None:
        self._inner = inner
        self._odd = odd
        self._left = at

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        for token in self._inner.propose(context_ids):
            self._left -= 1
            yield token if self._left >= 0 else self._spoil(token, context_ids)

    def close(self) -> None:
        self._inner.close()
        if self._odd == "close raises":
            raise RuntimeError("a bug")

    def _spoil(self, token: DraftToken, context_ids: Any) -> Any:
        if self._odd == "raises CancelledError":
            raise asyncio.CancelledError
        if self._odd == "raises":
            raise RuntimeError("a bug")
        if self._odd == "appends to the context":
            context_ids.append(35)
        return _ODD_TOKENS[self._odd](token) if self._odd in _ODD_TOKENS else token


def make_local_draft(
    kind: LocalDraftKind, text: str, *, seed: int, rate: float, odd: str, at: int
) -> tuple[DraftProvider | LlmProvider | None, TableModel | None]:
    """The draft of a case with a local target, and its model."""
    draft: DraftProvider | None = None
    match kind:
        case "same model" | "other model":
            model = TableModel(text, name="table:draft", seed=seed if kind == "same model" else seed + 1, order=6)
            return LocalProvider(model), model
        case "lookup":
            draft = PromptLookup()
        case "suffix":
            draft = SuffixDraft()
        case "given":
            draft = ReferenceDraft(spoil_words(text, seed, rate))
        case "joined":
            draft = CascadeDraft(PromptLookup(), ReferenceDraft(spoil_words(text, seed, rate)))
        case "odd":
            draft = OddTokens(text, odd, at)
        case "none":
            pass
    return draft, None
