"""A provider as draft: any chat model piece by piece, and a local one token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final

from llm_spec.contract.draft import DraftCapabilities, DraftPiece, DraftProvider
from llm_spec.contract.errors import DraftError
from llm_spec.contract.events import Finish, ReasoningDelta, StreamEvent, TextDelta
from llm_spec.contract.fields import METADATA_FIELDS
from llm_spec.contract.optional import WrappedDraft, stream_with_token_ids_if_possible
from llm_spec.contract.provider import LlmProvider
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.token_model import DraftToken, TokenDraft, TokenModel, TokenSampler
from llm_spec.local.caches import prefill_prompt

__all__ = ["ProviderDraft"]

# tokens read in one pass: more would need much memory for logits that are not used
_MAX_UNREAD: Final = 64


class ProviderDraft:
    """Uses a provider as draft.

    If its model runs in this process, it proposes token ids to targets with the same tokenizer.
    """

    def __init__(self, provider: LlmProvider) -> None:
        self._provider = provider

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def capabilities(self) -> DraftCapabilities:
        """The capabilities of the provider's model."""
        can = self._provider.capabilities
        return DraftCapabilities(continues_prefix=can.continue_prefix, token_model=can.token_model)

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        prefix = request.prefix if self._provider.capabilities.continue_prefix else ""
        request = replace(
            _strip_target_fields(request),
            max_tokens=max_tokens,
            prefix=prefix,
            tools=(),
            tool_choice=None,
            top_logprobs=None,
        )
        model = self.capabilities.token_model
        if model is not None:
            # needs numpy, which such a model has
            from llm_spec.local.answer import stream_token_model

            async with (
                stream_token_model(model, request, exact=False) as events,
                aclosing(_convert_events_to_pieces(events)) as pieces,
            ):
                yield pieces
            return
        async with (
            stream_with_token_ids_if_possible(self._provider, request) as events,
            aclosing(_convert_events_to_pieces(events)) as pieces,
        ):
            yield pieces

    def for_request(self) -> DraftProvider:
        """Return itself, or for a local model a draft that makes one call at a time.

        Each call then reuses the cache of the one before it.
        """
        return self if self.capabilities.token_model is None else _SerialDraft(self)

    async def aclose(self) -> None:
        await self._provider.aclose()

    def token_draft_refusal(self, target: TokenModel) -> str | None:
        model = self._provider.capabilities.token_model
        if model is None:
            return f"draft {self.name} gives text, not token ids"
        if model.tokenizer.fingerprint != target.tokenizer.fingerprint:
            return (
                f"draft {self.name} (vocabulary {model.vocab_size}) and target {target.name} (vocabulary "
                f"{target.vocab_size}) have different tokenizers"
            )
        return None

    def open_token_draft(self, target: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> TokenDraft:
        model, refusal = self._provider.capabilities.token_model, self.token_draft_refusal(target)
        if model is None or refusal is not None:
            raise DraftError(str(refusal))
        return _ModelTokenDraft(model, choose, prompt_ids)


class _SerialDraft(WrappedDraft):
    """Makes one call at a time; a cancelled call ends within a forward pass and frees its cache."""

    def __init__(self, draft: DraftProvider) -> None:
        super().__init__(draft)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def draft(self, request: ChatRequest, max_tokens: int) -> AsyncGenerator[AsyncIterator[DraftPiece]]:
        async with self._turn, self._draft.draft(request, max_tokens) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Do nothing: the wrapped draft is not its own."""


class _ModelTokenDraft:
    """Drafts with a cache of its own, and keeps the part of it that the target has confirmed."""

    def __init__(self, model: TokenModel, choose: TokenSampler, prompt_ids: Sequence[int]) -> None:
        if len(prompt_ids) >= model.context_length:
            raise DraftError(
                f"the prompt has {len(prompt_ids)} tokens; {model.name} takes fewer than {model.context_length}"
            )
        if max(prompt_ids, default=0) >= model.vocab_size:
            raise DraftError(
                f"the prompt has token {max(prompt_ids)}; {model.name} has tokens 0 to {model.vocab_size - 1}"
            )
        self._context_length = model.context_length
        self._vocab_size = model.vocab_size
        self._choose_and_check_finite = choose
        self._cached_ids = list(prompt_ids[:-1])
        self._num_confirmed = len(self._cached_ids)  # how many of them the last context confirmed
        self._session = model.open(exact=False)
        try:
            prefill_prompt(self._session, self._cached_ids)
        except BaseException:
            self._session.close()
            raise

    def propose(self, context_ids: Sequence[int]) -> Iterator[DraftToken]:
        self._truncate_to_shared_prefix(context_ids)
        ids = list(context_ids)
        unread = ids[len(self._cached_ids) :]
        if max(unread) >= self._vocab_size:
            return  # a padding column of the target, which this model does not have
        while len(unread) > _MAX_UNREAD:  # after a pause
            self._session.forward(unread[:_MAX_UNREAD], num_rows=1)
            self._cached_ids += unread[:_MAX_UNREAD]
            unread = unread[_MAX_UNREAD:]
        while len(ids) < self._context_length:
            logits = self._session.forward(unread, num_rows=1)[0]
            self._cached_ids += unread
            token = self._choose_and_check_finite(logits, ids)
            yield token
            unread = [token.token_id]
            ids.append(token.token_id)

    def close(self) -> None:
        self._session.close()

    def _truncate_to_shared_prefix(self, context_ids: Sequence[int]) -> None:
        """Cut the cache back to the prefix shared with the context.

        At least one token of the context must be left to read.
        """
        limit = min(len(self._cached_ids), len(context_ids) - 1)
        start = min(self._num_confirmed, limit)
        agree = next((i for i in range(start, limit) if self._cached_ids[i] != context_ids[i]), limit)
        self._num_confirmed = agree
        del self._cached_ids[agree:]
        self._session.truncate(agree)


def _strip_target_fields(request: ChatRequest) -> ChatRequest:
    """Return the request without native messages and server labels: they are the target's."""
    # nearly always true
    if not request.extra and all(message.native is None for message in request.messages):
        return request
    extra = {name: value for name, value in request.extra.items() if name not in METADATA_FIELDS}
    return replace(request, messages=tuple(replace(m, native=None) for m in request.messages), extra=extra)


async def _convert_events_to_pieces(events: AsyncIterator[StreamEvent]) -> AsyncGenerator[DraftPiece]:
    held_ids: list[int] = []  # ids without text yet, as of the first half of a character
    is_known = True  # whether these ids belong to the next text only
    async for event in events:
        match event:
            case TextDelta(text="", token_ids=token_ids):
                held_ids += token_ids or ()
            case TextDelta(text=text, token_ids=token_ids):
                is_known = is_known and token_ids is not None
                yield DraftPiece(text, (*held_ids, *(token_ids or ())) if is_known else None)
                held_ids, is_known = [], True
            case ReasoningDelta():
                is_known = False
            case Finish():
                yield DraftPiece("", finish_reason=event.finish_reason, usage=event.usage)
            case _:
                pass
