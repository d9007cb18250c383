"""Converts this library's requests to the bodies that OpenAI takes. Pure."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from llm_spec import ChatMessage, ChatRequest, InvalidRequestError, Sampling
from llm_spec.kit.openai_logprobs import build_logprob_fields
from llm_spec_openai.models import takes_max_tokens_field

__all__ = ["Body", "build_request_body"]

Body: TypeAlias = dict[str, Any]

_UNSUPPORTED_SAMPLING: Final = ("top_k", "min_p", "repetition_penalty")  # options of other servers


def build_request_body(request: ChatRequest, model: str, *, is_openai: bool, takes_predictions: bool) -> Body:
    """Build the JSON of a streaming request. `extra` comes last and wins.

    Options that are not set are left out. Raises InvalidRequestError for a raw prompt, for a
    prefix, and, if the server is OpenAI's (`is_openai`), for options that OpenAI does not have. A
    prediction is a hint: it is left out if the model does not take one, or not for such a request.
    """
    if request.raw:
        raise InvalidRequestError("raw is set; OpenAI's models take only messages: leave it out")
    if request.prefix:
        raise InvalidRequestError(f"prefix is {request.prefix!r}; OpenAI's models cannot continue an assistant's text")
    sampling = _build_sampling_fields(request.sampling)
    for name in _UNSUPPORTED_SAMPLING:
        if is_openai and name in sampling and name not in request.extra:
            raise InvalidRequestError(f"{name} is {sampling[name]!r}; OpenAI has no such option: leave it out")
    has_prediction = takes_predictions and request.prediction is not None and _may_have_prediction(request)
    by_max_tokens = takes_predictions or takes_max_tokens_field(model, is_openai=is_openai)
    optional: Body = {
        "max_tokens" if by_max_tokens else "max_completion_tokens": request.max_tokens,
        "stop": list(request.stop),
        "tools": [dict(tool) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "response_format": request.response_format,
        "prediction": {"type": "content", "content": request.prediction} if has_prediction else None,
    }
    return {
        "model": model,
        "messages": [_build_message(message, is_openai=is_openai) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
        **{name: value for name, value in optional.items() if value},
        **build_logprob_fields(request),
        **request.extra,
    }


def _build_message(message: ChatMessage, *, is_openai: bool) -> Body:
    """Convert a message. OpenAI takes no reasoning of earlier turns.

    It stays in a chat message that came from a client as it is.
    """
    body = message.to_openai()
    if is_openai and message.native is None:
        for name in ("reasoning_content", "reasoning_details"):
            body.pop(name, None)
    return body


def _build_sampling_fields(sampling: Sampling) -> Body:
    fields = {name: value for name, value in vars(sampling).items() if value not in (None, {})}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    return fields


def _may_have_prediction(request: ChatRequest) -> bool:
    """Return True if OpenAI takes a prediction with this request.

    It does not with tools, log-probabilities or positive penalties.
    """
    penalties = (request.sampling.presence_penalty, request.sampling.frequency_penalty)
    is_plain = not request.tools and request.top_logprobs is None
    return is_plain and all(penalty is None or penalty <= 0 for penalty in penalties)
