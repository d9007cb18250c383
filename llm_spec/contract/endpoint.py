"""The contract of servers that take and return token ids.

It includes providers that have to find out what their server can do.
"""

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
    """The target's own token after a prefix.

    The text of a token that ends inside a character may be empty or hold U+FFFD. Then only `decode`
    knows the text.

    `is_end`: the answer ends with this token, whose text is empty.
    """

    token_id: int
    text: str
    is_end: bool = False


class TopTokens(NamedTuple):
    """The likeliest tokens at one position, by the model's own logits.

    `top`: pairs `(token id, log-probability)`, best first.
    """

    top: tuple[tuple[int, float], ...]


class TokenEndpoint(Protocol):
    """A target whose server takes and returns token ids. Safe for concurrent requests.

    Every call raises TargetError if the server fails, and InvalidRequestError for a request that
    the server calls invalid. If the server no longer knows a call, the provider loses the
    capability until it is discovered again.
    """

    @property
    def context_length(self) -> int | None:
        """The most tokens of prompt and answer together, or None if unknown."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Return ids that have this text, a part of an answer.

        The model itself might choose other ids for it.
        """
        ...

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without control tokens; undecodable bytes become U+FFFD."""
        ...

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        """Return the ids of the prompt, with the chat template applied.

        They end where the answer begins, or after `request.prefix`.
        """
        ...

    async def sample_next(self, prefixes: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledToken]:
        """Sample one token after each of several prefixes, in one call.

        A seed in `sampling` is used for every prefix.
        """
        ...

    def stream_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Stream like the provider's own `stream`, with `token_ids` in every `TextDelta`.

        The text of a `TextDelta` may be empty.
        """
        ...

    def stream_after(
        self, token_ids: Sequence[int], request: ChatRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Stream what follows `token_ids`, in events like those of `stream_chat`.

        Sampling and `max_tokens` are those of `request`.
        """
        ...


class TokenScorer(Protocol):
    """A target whose server returns the probabilities of given tokens (teacher forcing)."""

    @property
    def max_top(self) -> int:
        """The most tokens that it reports for a position."""
        ...

    async def score(self, token_ids: Sequence[int], *, num_rows: int, top: int) -> list[TopTokens]:
        """Return the `top` likeliest tokens after each of the last `num_rows` of `token_ids`.

        The result has `num_rows` items.
        """
        ...


class ParsedMessage(NamedTuple):
    """An answer so far, as the server's chat endpoint would parse it.

    `finish_reason`: the reason why the answer ended, or None if it continues.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None


# Parts of an answer beside text. `form_after_reasoning`: after the reasoning, a grammar constrains
# the answer to a form.
MessagePart: TypeAlias = Literal["tool_calls", "reasoning", "form_after_reasoning"]


class MessageParser(Protocol):
    """Parses an answer's token ids as the server's own chat endpoint does.

    A server is not trusted untested: its parsing was first compared with its own chat messages.
    """

    @property
    def parts(self) -> frozenset[MessagePart]:
        """The parts beside text in which parsed answers were equal to the chat endpoint's."""
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
        """Return the message of an answer so far.

        `token_ids` exclude the token that ends the answer. With a `finish_reason` the answer is
        complete. The message for more tokens begins with the message for fewer tokens, except
        perhaps at a malformed call. `by_token` parses malformed calls as chat does, and needs one
        server call for each token. The ids of calls are new each time.

        Raises TargetError if the server fails, or no longer supports this. In the second case the
        provider loses the capability.
        """
        ...

    def reject(self) -> None:
        """Report that its parsing differs from the chat endpoint.

        The provider loses the capability until it is tried again.
        """
        ...


class DecodingConstraint(NamedTuple):
    """The part of an answer that a server's constrained decoding restricts.

    `triggers`: a constrained part begins with one of these texts; before it the answer is free.
    None means that all of the answer is constrained, except its reasoning.
    `is_reasoning_free`: True if the reasoning has not ended with the prompt.
    `generation`: the server's own form of the request. `stream_constrained_after` builds its calls
    from it.
    """

    triggers: tuple[str, ...]
    is_reasoning_free: bool
    generation: Mapping[str, Any]


@runtime_checkable
class ConstrainedStreaming(Protocol):
    """A `MessageParser` whose server can continue an answer before its constraint begins.

    Optional beside `MessageParser`. From there the server decodes as in its own chat: the
    constraint begins with the text that it writes. Both methods raise like `parse`.
    """

    async def find_constraint(self, request: ChatRequest) -> DecodingConstraint | None:
        """Return the constraint on the chat's answer to a request, or None if there is none."""
        ...

    def stream_constrained_after(
        self,
        constraint: DecodingConstraint,
        prompt_ids: Sequence[int],
        written_ids: Sequence[int],
        request: ChatRequest,
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Stream what follows the prompt and `written_ids`.

        The events are like those of `TokenEndpoint.stream_chat`. The seed and `max_tokens` are
        those of `request`; the constraint decides the rest.
        """
        ...


Feature: TypeAlias = Literal["token_endpoint", "token_scorer", "continue_prefix", "message_parser"]
# The other two need no discovery
TargetFeature: TypeAlias = Feature | Literal["token_model", "prediction"]


@runtime_checkable
class Discoverable(Protocol):
    """A provider that has to find out what its server can do; optional beside `LlmProvider`."""

    async def discover(self, feature: Feature) -> None:
        """Try a feature; afterwards `capabilities` says if the server has it.

        A feature that was found is not tried again. A feature that is missing, or was lost, is
        tried again after a while. Concurrent callers share one trial, and each of them may stop
        waiting for it. Raises TransientError if the server cannot answer now. Nothing is known
        then, and the next call tries again.
        """
        ...


@runtime_checkable
class FeatureLossAware(Protocol):
    """A `Discoverable` that is notified when a feature was lost; optional beside it."""

    def mark_feature_lost(self, feature: Feature) -> None:
        """Report that a call with a feature was refused, and answered without it.

        The feature counts as missing until `discover` finds it again.
        """
        ...
