"""The APIs that the server speaks, each as a few functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llm_spec.chat import ApiName
from llm_spec.result import SpeculativeResult
from llm_spec.server.bodies import Asked, Body, Json
from llm_spec.server.chat_wire import ChatEncoder, chat_body, read_chat
from llm_spec.server.completions_wire import CompletionEncoder, completion_body, read_completions
from llm_spec.server.encoding import Encoder
from llm_spec.server.messages_answer import MessagesEncoder, messages_body
from llm_spec.server.messages_wire import read_messages_api
from llm_spec.server.problems import Problem
from llm_spec.server.responses_answer import ResponsesEncoder, response_body
from llm_spec.server.responses_wire import read_responses

__all__ = ["APIS", "Api", "Naming"]


@dataclass(slots=True, kw_only=True)
class Naming:
    """What an answer is called, and how its stream is wanted."""

    answer_id: str
    model: str
    trace: bool
    started_s: float


@dataclass(frozen=True, kw_only=True)
class Api:
    """One API: a body to requests (more than one only where it has several prompts), answers to a body or a stream.

    `read` is told the target's own API, None of a model in this process. `relays`: whether several choices and
    log-probabilities may be asked for, which only the target's own chunks tell.
    """

    name: str
    read: Callable[[Body, ApiName | None], list[Asked]]
    whole: Callable[[Sequence[SpeculativeResult], Sequence[Asked], Naming], Json]
    encoder: Callable[[Asked, Naming], Encoder]
    problem: Callable[[Problem], Json] = Problem.to_openai
    relays: bool = False


def _chat_encoder(asked: Asked, naming: Naming) -> Encoder:
    return ChatEncoder(
        answer_id=naming.answer_id,
        model=naming.model,
        include_usage=asked.include_usage,
        trace=naming.trace,
        started_s=naming.started_s,
    )


APIS: Final = {
    "/v1/chat/completions": Api(
        name="chat.completions",
        read=lambda body, speaks: [read_chat(body, is_local=speaks is None)],
        whole=lambda results, _, n: chat_body(results[0], answer_id=n.answer_id, model=n.model),
        encoder=_chat_encoder,
        relays=True,
    ),
    "/v1/completions": Api(
        name="completions",
        read=lambda body, speaks: read_completions(body, is_local=speaks is None),
        whole=lambda results, asked, n: completion_body(results, asked, answer_id=n.answer_id, model=n.model),
        encoder=lambda asked, n: CompletionEncoder(asked, answer_id=n.answer_id, model=n.model),
        relays=True,
    ),
    "/v1/responses": Api(
        name="responses",
        read=lambda body, speaks: [read_responses(body, is_local=speaks is None)],
        whole=lambda results, asked, n: response_body(results[0], asked[0], answer_id=n.answer_id, model=n.model),
        encoder=lambda asked, n: ResponsesEncoder(asked, answer_id=n.answer_id, model=n.model),
    ),
    "/v1/messages": Api(
        name="messages",
        read=lambda body, speaks: [read_messages_api(body, speaks=speaks)],
        whole=lambda results, asked, n: messages_body(results[0], asked[0], answer_id=n.answer_id, model=n.model),
        encoder=lambda asked, n: MessagesEncoder(asked, answer_id=n.answer_id, model=n.model),
        problem=Problem.to_anthropic,
    ),
}
