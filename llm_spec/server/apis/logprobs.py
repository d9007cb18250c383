"""Log-probabilities in OpenAI's APIs: in requests and in answers. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import TokenLogprob
from llm_spec.kit.openai_logprobs import make_logprob_finite
from llm_spec.server.apis.fields import Body, Json, get_typed_field

__all__ = ["CompletionLogprobsBuilder", "get_requested_top_logprobs"]


def get_requested_top_logprobs(body: Body, *, is_requested: bool, requested_by: str) -> int | None:
    """Return a body's `top_logprobs`, or None if it does not request log-probabilities.

    `requested_by`: how a body requests them, for the error.

    Raises InvalidRequestError if `top_logprobs` is set without such a request.
    """
    top_logprobs: int | None = get_typed_field(body, "top_logprobs", None, int)
    if is_requested:
        return top_logprobs or 0
    if top_logprobs:
        raise InvalidRequestError(f"top_logprobs is set; it needs {requested_by}")
    return None


class CompletionLogprobsBuilder:
    """Builds the `logprobs` of a choice of a plain completion, whole or piece by piece.

    They say at which character each token begins.
    """

    def __init__(self) -> None:
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def build_next(self, logprobs: Sequence[TokenLogprob] | None) -> Json | None:
        """Return the `logprobs` of the next tokens, or None if none were requested.

        A token is among the likeliest in its place.
        """
        if logprobs is None:
            return None
        tops = [_map_top_texts_to_logprobs(logprob) for logprob in logprobs]
        return {
            "tokens": [logprob.token for logprob in logprobs],
            "token_logprobs": [make_logprob_finite(logprob.logprob) for logprob in logprobs],
            "top_logprobs": tops if any(logprob.top for logprob in logprobs) else None,
            "text_offset": [self._advance_text_offset(logprob) for logprob in logprobs],
        }

    def _advance_text_offset(self, logprob: TokenLogprob) -> int:
        start = self._num_characters
        token_bytes = logprob.token.encode() if logprob.token_bytes is None else logprob.token_bytes
        self._num_characters += len(self._decoder.decode(token_bytes))
        return start


def _map_top_texts_to_logprobs(logprob: TokenLogprob) -> dict[str, float]:
    """Map texts to log-probabilities, likeliest first.

    Several tokens may have one text (parts of characters); the likeliest of them counts.
    """
    top: dict[str, float] = {}
    for likely in (*logprob.top, logprob):
        top.setdefault(likely.token, make_logprob_finite(likely.logprob))
    return top
