"""The contract of chat models: every provider needs `LlmProvider` and `Capabilities`, no more.

A class fits a protocol by having its members; it inherits nothing.
`llm_spec.testing.check_provider_conformance` checks that an implementation keeps the promises of
the docstrings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from llm_spec.contract.events import ChatResponse, StreamEvent
from llm_spec.contract.messages import ApiName
from llm_spec.contract.request import ChatRequest

if TYPE_CHECKING:
    from llm_spec.contract.endpoint import Feature, MessageParser, TokenEndpoint, TokenScorer
    from llm_spec.contract.token_model import TokenModel

__all__ = [
    "SERVER_FIRST_CHUNK_S",
    "VENDOR_FIRST_CHUNK_S",
    "Capabilities",
    "ChunkStreaming",
    "FieldTranslator",
    "InputTokenCounter",
    "LlmProvider",
]

# Defaults of the wait for a first chunk. A comment that keeps a connection alive is not a chunk;
# otherwise a server that sends nothing else would be waited for forever.
SERVER_FIRST_CHUNK_S: Final = 600.0  # OpenAI's and Anthropic's SDKs give up after it, too
# OpenAI's guide to flex processing raises its SDK's 600 s to this. Models that reason write
# nothing meanwhile.
VENDOR_FIRST_CHUNK_S: Final = 900.0


@runtime_checkable
class LlmProvider(Protocol):
    """A chat model. Safe for concurrent requests. The code that made it calls `aclose`."""

    @property
    def name(self) -> str:
        """The name in results and logs, `provider:model`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The model's abilities beyond chat, as far as they are known now."""
        ...

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer piece by piece; the last event is a `Finish`.

        Leaving the context, in any way, ends the request. Raises InvalidRequestError for a request
        that the model cannot serve and TargetError if the model fails. Cancellation passes through.
        """
        ...

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Answer at once, with the same text as `stream`."""
        ...

    async def aclose(self) -> None:
        """Release what the provider holds; calling it twice is harmless.

        Running answers and all later calls end with ClosedError
        (`llm_spec.kit.open_calls.OpenCalls`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """A model's abilities beyond chat.

    None or False means that the model lacks an ability, or that it is unknown yet.

    `continue_prefix`: the model continues `ChatRequest.prefix`. For a `Discoverable`, this is what
    servers of its kind usually do, until `discover("continue_prefix")` has tried it.
    `prediction`: it takes predicted outputs (`ChatRequest.prediction`) and answers faster if they
    are right.
    `shares_prompt_cache`: its server reads the common beginning of several calls once.
    `whole_answers`: `complete` is a call of its own that costs less than a stream. Cancelling it
    ends the work.
    `separates_reasoning`: its chat endpoint was seen to remove reasoning from an answer's text.
    Then only a `message_parser` can tell what its tokens are.
    `discoverable`: the features that a `Discoverable` may find. No server of its kind has the
    others.
    `api`: the API that its server speaks. Fields that a client gives in the same API
    (`ChatMessage.native`, `ChatRequest.extra`) are sent unchanged.
    `first_chunk_s`, `between_chunks_s`: how long to wait for a chunk if `Timeouts` does not say.
    None means without limit, as for a model in this process.
    """

    context_length: int | None = None
    tools: bool = False
    response_format: bool = False
    continue_prefix: bool = False
    prediction: bool = False
    shares_prompt_cache: bool = False
    whole_answers: bool = False
    separates_reasoning: bool = False
    discoverable: frozenset[Feature] = frozenset()
    api: ApiName = "chat"
    first_chunk_s: float | None = None
    between_chunks_s: float | None = None
    token_model: TokenModel | None = None
    token_endpoint: TokenEndpoint | None = None
    token_scorer: TokenScorer | None = None
    message_parser: MessageParser | None = None


@runtime_checkable
class ChunkStreaming(Protocol):
    """A provider that can pass on its server's own chunks; optional beside `LlmProvider`."""

    def stream_chunks(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[Mapping[str, Any]]]:
        """Stream like `stream`, in the JSON objects of OpenAI's streams.

        They hold data that events cannot carry, such as several choices.
        """
        ...


@runtime_checkable
class InputTokenCounter(Protocol):
    """A provider whose server counts the tokens of a request without answering it.

    Optional beside `LlmProvider`.
    """

    async def count_input_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's input; raises like `stream`."""
        ...


@runtime_checkable
class FieldTranslator(Protocol):
    """A provider whose server refuses fields of OpenAI's API; optional beside `LlmProvider`."""

    def translate_openai_fields(self, request: ChatRequest) -> tuple[ChatRequest, Sequence[str]]:
        """Return a client's request for OpenAI's API, translated, and the names of omitted fields.

        The translated request has the server's own fields in `extra`. Raises InvalidRequestError
        for a field without which the answer would have another form.
        """
        ...
