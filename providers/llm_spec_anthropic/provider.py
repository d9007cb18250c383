"""AnthropicProvider: Claude through the official SDK.

Answers are always streamed. So a reader that leaves closes the connection, which ends the server's
work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Final

from anthropic import AsyncAnthropic

from llm_spec import ChatRequest, ChatResponse, StreamEvent, TargetError
from llm_spec.contract.endpoint import Feature
from llm_spec.contract.provider import VENDOR_FIRST_CHUNK_S, Capabilities
from llm_spec.contract.response import complete_from_stream
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.continuation import ContinuationTest
from llm_spec_anthropic.answer import AnthropicAnswerReader
from llm_spec_anthropic.client import AnthropicMessagesClient, SdkStream
from llm_spec_anthropic.convert import build_request_body
from llm_spec_anthropic.fields import translate_openai_fields
from llm_spec_anthropic.models import can_model_continue_prefix

__all__ = ["AnthropicProvider"]

_COUNT_REQUEST_FIELDS: Final = (  # the fields that the API's counting takes
    "cache_control",
    "context_management",
    "messages",
    "model",
    "output_config",
    "output_format",
    "speed",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)


class AnthropicProvider:
    """A Claude model, or a model behind a server that speaks Anthropic's messages at `base_url`.

    If the key (`ANTHROPIC_API_KEY`) or the address is not given, the SDK finds it. The key is in no
    repr, log or error. Any number of event loops may use the provider; each has connections of its
    own. A given `client` stays the caller's, belongs to one loop, and keeps its timeouts, but its
    retries are off. Requests raise InvalidRequestError for what the API calls invalid and for
    `min_p`, `logit_bias` and penalties, which it lacks; TransientError for what may be retried;
    TargetError for the rest.

    The API has no seeds: a request's seed is not sent. It requires a limit: without `max_tokens` a
    request gets 32,000, or 4,096 for Claude 3, older models and names without a version. Models up
    to 4.5 continue a `prefix`. `extra` holds fields of the API, such as `thinking`; its `betas`, a
    list of names, go into the header `anthropic-beta`. Fields of OpenAI's API in `extra` (`user`,
    `parallel_tool_calls`, `reasoning_effort`) are translated. Fields without a counterpart
    (`store`, `verbosity`) are left out.
    """

    def __init__(
        self,
        model: str,
        *,
        client: AsyncAnthropic | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self.name = f"anthropic:{model}"
        self.capabilities = Capabilities(
            tools=True,
            response_format=True,
            continue_prefix=can_model_continue_prefix(model),
            api="messages",
            first_chunk_s=VENDOR_FIRST_CHUNK_S,
        )
        self._model = model
        self._client = AnthropicMessagesClient(self.name, client, base_url=base_url, api_key=api_key)
        self._continuation = ContinuationTest(self.name, self.stream)

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        body = build_request_body(request, self._model)
        async with AsyncExitStack() as stack:
            stream = await self._client.open_answer_stream(stack, body, betas=body.pop("betas", None) or ())
            yield await stack.enter_async_context(aclosing(self._read_answer_events(stream)))

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    def translate_openai_fields(self, request: ChatRequest) -> tuple[ChatRequest, Sequence[str]]:
        return translate_openai_fields(request, self._model, is_openai_client=True)

    async def count_input_tokens(self, request: ChatRequest) -> int:
        body = build_request_body(request, self._model)
        betas = body.pop("betas", None) or ()
        return await self._client.count_request_tokens(
            {name: body[name] for name in _COUNT_REQUEST_FIELDS if name in body}, betas=betas
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def discover(self, feature: Feature) -> None:
        can_try = feature == "continue_prefix" and self.capabilities.continue_prefix
        if can_try and not await self._continuation.can_continue():
            self.capabilities = replace(self.capabilities, continue_prefix=False)

    # --------------------------------------------------------------------------------------- inside

    async def _read_answer_events(self, stream: SdkStream) -> AsyncGenerator[StreamEvent]:
        reader = AnthropicAnswerReader()
        with self._translate_failures(reader):
            async with aclosing(self._client.read_stream_objects(stream)) as events:
                async for event in events:
                    for stream_event in reader.read_event(event):
                        yield stream_event
            for stream_event in reader.end():
                yield stream_event

    @contextmanager
    def _translate_failures(self, reader: AnthropicAnswerReader) -> Generator[None]:
        """Convert errors in an answer to this library's, with the text that has come."""
        try:
            yield
        except TargetError as error:
            error.partial_text = reader.text
            raise
        except BrokenAnswerError as error:
            failure = self._client.convert_broken_answer_error(error)
            if isinstance(failure, TargetError):
                failure.partial_text = reader.text
            raise failure from None
