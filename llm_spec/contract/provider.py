"""The contract of chat models: `LlmProvider` and `Capabilities` are all that every provider needs.

A class fits a protocol by having its members; it inherits nothing. `llm_spec.testing.check_provider_conformance` checks
an implementation against what the docstrings promise.
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

# How long a first piece is waited for where nobody says. A comment that keeps a connection alive is no piece, or a
# server that sends nothing else would be waited for without end.
SERVER_FIRST_CHUNK_S: Final = 600.0  # after which OpenAI's and Anthropic's SDKs give up, so nobody waits for it longer
# OpenAI's guide to flex processing raises its SDK's 600 s to this; models that reason write nothing meanwhile
VENDOR_FIRST_CHUNK_S: Final = 900.0


@runtime_checkable
class LlmProvider(Protocol):
    """A chat model. Safe for concurrent requests. The code that made it calls `aclose`."""

    @property
    def name(self) -> str:
        """What it is called in results and logs, `provider:model`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this model can do beyond chat, as far as is known now."""
        ...

    def stream(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[StreamEvent]]:
        """Answer piece by piece; the last event is a `Finish`.

        Leaving the context, in whatever way, ends the request. Raises InvalidRequestError for what the model
        cannot serve and TargetError when it fails; cancellation passes through.
        """
        ...

    async def complete(self, request: ChatRequest) -> ChatResponse:
        """Answer at once; the same text as `stream` would give."""
        ...

    async def aclose(self) -> None:
        """Release what the provider holds; calling it twice is harmless.

        Answers under way end with ClosedError (`llm_spec.kit.open_calls.OpenCalls`), and so does every call after it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model can do beyond chat. None or False: it cannot, or it is not known yet.

    `continue_prefix`: it continues `ChatRequest.prefix`. For a `Discoverable`, this is what servers of its kind usually
    do, until `discover("continue_prefix")` has tried it.
    `prediction`: it takes predicted outputs (`ChatRequest.prediction`) and answers faster where they are right.
    `shares_prompt_cache`: of calls that begin alike, its server reads the common beginning once.
    `whole_answers`: `complete` is a call of its own that costs less than a stream, and cancelling it ends the work.
    `separates_reasoning`: its chat endpoint was seen to take reasoning out of an answer's text, so that only a
    `message_parser` tells what its tokens are.
    `discoverable`: what a `Discoverable` may find its server to have. The rest no server of its kind has.
    `api`: the API that its server speaks. Fields that a client gives in the same API (`ChatMessage.native`,
    `ChatRequest.extra`) are sent unchanged.
    `first_chunk_s`, `between_chunks_s`: how long it is waited for where `Timeouts` does not say; None: as long as it
    takes, as a model in this process.
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
        """As `stream`, in JSON objects of OpenAI's streams: for what events cannot say (choices, log-probabilities)."""
        ...


@runtime_checkable
class InputTokenCounter(Protocol):
    """A provider whose server counts the tokens of a request without answering it; optional beside `LlmProvider`."""

    async def count_input_tokens(self, request: ChatRequest) -> int:
        """The tokens of a request's input; raises as `stream`."""
        ...


@runtime_checkable
class FieldTranslator(Protocol):
    """A provider whose server refuses fields of OpenAI's API; optional beside `LlmProvider`."""

    def translate_openai_fields(self, request: ChatRequest) -> tuple[ChatRequest, Sequence[str]]:
        """The request of a client of OpenAI's API with its server's own words in `extra`, and what they leave out.

        Raises InvalidRequestError for a field without which the answer would be of another form.
        """
        ...
