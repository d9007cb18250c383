"""The contract of servers that take and return token ids, and of providers that find out what their server can do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from llm_spec.contract.events import FinishReason, StreamEvent
from llm_spec.contract.messages import ToolCall
from llm_spec.contract.request import ChatRequest, Sampling

__all__ = [
    "ConstrainedStreaming",
    "DecodingConstraint",
    "Discoverable",
    "Feature",
    "FeatureLossAware",
    "MessageParser",
    "MessagePart",
    "ParsedMessage",
    "SampledToken",
    "TargetFeature",
    "TokenEndpoint",
    "TokenScorer",
    "TopTokens",
]


class SampledToken(NamedTuple):
    """The target's own token after a prefix; `is_end`: with it the answer is over (its text is empty).

    The text of a token that ends inside a character may be empty or hold U+FFFD: then only `decode` can tell.
    """

    token_id: int
    text: str
    is_end: bool = False


class TopTokens(NamedTuple):
    """The likeliest tokens at one position: `(token id, log-probability)`, best first, by the model's own logits."""

    top: tuple[tuple[int, float], ...]


class TokenEndpoint(Protocol):
    """A target on a server that takes and tells token ids of its own vocabulary. Safe for concurrent requests.

    Every call raises TargetError when the server fails, and InvalidRequestError for what it calls invalid; a call that
    the server does not know any more takes the capability away, until it is found again.
    """

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None: unknown."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Ids whose text this is, a stretch of an answer; not always those that the model itself would choose."""
        ...

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; undecodable bytes become U+FFFD."""
        ...

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        """The prompt: chat template applied, ready for the answer, or for what follows `request.prefix`."""
        ...

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        """One token after each of several prefixes, in one call. A seed in `sampling` is the seed of every one."""
        ...

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """As the provider's own `stream`, every `TextDelta` with its `token_ids` (a text may be empty)."""
        ...

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """What follows `token_ids`, with the sampling and `max_tokens` of `request`, in events as `stream_chat`."""
        ...


class TokenScorer(Protocol):
    """A target on a server that says how likely it finds given tokens (teacher forcing)."""

    @property
    def max_top(self) -> int:
        """Most tokens that it reports for a position."""
        ...

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        """The `top` likeliest tokens after each of the last `num_rows` of `token_ids`: [num_rows]."""
        ...


class ParsedMessage(NamedTuple):
    """What a chat endpoint makes of an answer, as far as it goes; without `finish_reason` it goes on."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None


# What an answer may have beside text; `form_after_reasoning`: a form that a grammar holds it to once it has reasoned.
MessagePart: TypeAlias = Literal["tool_calls", "reasoning", "form_after_reasoning"]


class MessageParser(Protocol):
    """Makes of an answer's token ids the message that the server's own chat endpoint makes of them.

    A server is not believed to: what it makes of an answer was compared with its chat's own message first.
    """

    @property
    def parts(self) -> frozenset[MessagePart]:
        """What answers had, beside text, in which the two were the same."""
        ...

    async def parse(
        self,
        request: ChatRequest,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        *,
        by_token: bool = False,
    ) -> ParsedMessage:
        """The message of an answer so far, without the token that ends it; with a finish reason it is whole.

        What it gives for more tokens begins with what it gave for fewer, but perhaps not where a call is broken: there
        it is `by_token` that it reads as chat does, which takes a call of the server for each token. Ids of calls are
        new each time. Raises TargetError when the server fails, or does not do this any more, which takes the
        capability away.
        """
        ...

    def reject(self) -> None:
        """It was found to differ from the chat endpoint: the capability is taken away, until it is tried again."""
        ...


class DecodingConstraint(NamedTuple):
    """What a server's constrained decoding allows in an answer, and where it begins to.

    triggers: a constrained part begins with one of these texts, and before them the answer is free. None: all of it is
    constrained but its reasoning. is_reasoning_free: whether that has not ended with the prompt. generation: the
    server's own form of the request, of which `stream_constrained_after` makes the body of its calls.
    """

    triggers: tuple[str, ...]
    is_reasoning_free: bool
    generation: Mapping[str, Any]


@runtime_checkable
class ConstrainedStreaming(Protocol):
    """A `MessageParser` whose server goes on with an answer where its constraint has not begun; optional beside it.

    From there the server decodes as in its own chat: the constraint starts with what it writes. Both raise as `parse`.
    """

    async def find_constraint(self, request: ChatRequest) -> DecodingConstraint | None:
        """What constrains the chat's answer to a request; None: nothing does."""
        ...

    def stream_constrained_after(
        self,
        constraint: DecodingConstraint,
        prompt_ids: Sequence[int],
        written_ids: Sequence[int],
        request: ChatRequest,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """What follows the prompt and what was `written`, in events as `TokenEndpoint.stream_chat`.

        The seed and `max_tokens` are those of `request`, all else is the constraint's.
        """
        ...


Feature: TypeAlias = Literal["token_endpoint", "token_scorer", "continue_prefix", "message_parser"]
TargetFeature: TypeAlias = Feature | Literal["token_model", "prediction"]  # the others need not be discovered


@runtime_checkable
class Discoverable(Protocol):
    """A provider that has to ask its server what it can do; optional beside `LlmProvider`."""

    async def discover(self, feature: Feature) -> None:
        """Try a feature: afterwards `capabilities` tells whether it is there.

        A feature that is there is not tried; one that was not, or was lost, is again after a while. Callers at the same
        time share a trial, and each may leave it to the others. Raises TransientError where the server cannot answer
        now: nothing is known then, and the next call tries again.
        """
        ...


@runtime_checkable
class FeatureLossAware(Protocol):
    """A `Discoverable` that is notified when a feature was lost; optional beside it."""

    def mark_feature_lost(self, feature: Feature) -> None:
        """A call that needs a feature was refused, and the same request was answered without it.

        It is not there any more, until `discover` finds it again.
        """
        ...
