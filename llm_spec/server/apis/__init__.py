"""The APIs that the server speaks, each as a few functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llm_spec.contract.messages import ApiName
from llm_spec.decoder.result import SpeculativeResult
from llm_spec.server.apis.chat_completions import ChatStreamEncoder, build_chat_completion, parse_chat_request
from llm_spec.server.apis.completions import (
    CompletionStreamEncoder,
    build_completion_response,
    parse_completion_requests,
)
from llm_spec.server.apis.encoding import AnswerStreamEncoder
from llm_spec.server.apis.fields import Body, Json, ParsedRequest
from llm_spec.server.apis.messages_encoder import MessagesStreamEncoder, build_anthropic_message
from llm_spec.server.apis.messages_parser import parse_messages_request
from llm_spec.server.apis.responses_encoder import ResponsesStreamEncoder, build_responses_api_response
from llm_spec.server.apis.responses_parser import parse_responses_request
from llm_spec.server.problems import HttpProblem

__all__ = ["APIS", "AnswerEncodingContext", "ApiDefinition"]


@dataclass(slots=True, kw_only=True)
class AnswerEncodingContext:
    """The id and the model's name of an answer, and the options of its stream."""

    answer_id: str
    model: str
    trace: bool
    started_s: float


@dataclass(frozen=True, kw_only=True)
class ApiDefinition:
    """One API of the server.

    `target_api`: the API of targets to which its messages go as they are.
    `parse`: gets a body and the target's own API, or None for a model in this process. It returns
    several requests only for several prompts.
    `build_body`: builds the body of whole answers.
    `create_encoder`: creates the encoder of a streamed answer.
    `can_relay`: True if requests may ask for several choices and log-probabilities, which only the
    target's own chunks have.
    """

    name: str
    target_api: ApiName | None
    parse: Callable[[Body, ApiName | None], list[ParsedRequest]]
    build_body: Callable[[Sequence[SpeculativeResult], Sequence[ParsedRequest], AnswerEncodingContext], Json]
    create_encoder: Callable[[ParsedRequest, AnswerEncodingContext], AnswerStreamEncoder]
    build_error: Callable[[HttpProblem], Json] = HttpProblem.to_openai
    can_relay: bool = False


def _create_chat_stream_encoder(parsed: ParsedRequest, context: AnswerEncodingContext) -> AnswerStreamEncoder:
    return ChatStreamEncoder(
        answer_id=context.answer_id,
        model=context.model,
        include_usage=parsed.include_usage,
        trace=context.trace,
        started_s=context.started_s,
        has_functions="functions" in parsed.request.extra,
    )


APIS: Final = {
    "/v1/chat/completions": ApiDefinition(
        name="chat.completions",
        target_api="chat",
        parse=lambda body, target_api: [parse_chat_request(body, is_local=target_api is None)],
        build_body=lambda results, parsed, n: build_chat_completion(
            results[0], answer_id=n.answer_id, model=n.model, has_functions="functions" in parsed[0].request.extra
        ),
        create_encoder=_create_chat_stream_encoder,
        can_relay=True,
    ),
    "/v1/completions": ApiDefinition(
        name="completions",
        target_api="chat",
        parse=lambda body, target_api: parse_completion_requests(body, is_local=target_api is None),
        build_body=lambda results, parsed, n: build_completion_response(
            results, parsed, answer_id=n.answer_id, model=n.model
        ),
        create_encoder=lambda parsed, n: CompletionStreamEncoder(parsed, answer_id=n.answer_id, model=n.model),
        can_relay=True,
    ),
    "/v1/responses": ApiDefinition(
        name="responses",
        target_api=None,
        parse=lambda body, target_api: [parse_responses_request(body, is_local=target_api is None)],
        build_body=lambda results, parsed, n: build_responses_api_response(
            results[0], parsed[0], answer_id=n.answer_id, model=n.model
        ),
        create_encoder=lambda parsed, n: ResponsesStreamEncoder(parsed, answer_id=n.answer_id, model=n.model),
    ),
    "/v1/messages": ApiDefinition(
        name="messages",
        target_api="messages",
        parse=lambda body, target_api: [parse_messages_request(body, target_api=target_api)],
        build_body=lambda results, parsed, n: build_anthropic_message(
            results[0], parsed[0], answer_id=n.answer_id, model=n.model
        ),
        create_encoder=lambda parsed, n: MessagesStreamEncoder(parsed, answer_id=n.answer_id, model=n.model),
        build_error=HttpProblem.to_anthropic,
    ),
}
