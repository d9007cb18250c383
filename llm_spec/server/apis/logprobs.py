"""Log-probabilities in the words of OpenAI's APIs: how bodies request them, how answers report them. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llm_spec.contract.errors import InvalidRequestError
from llm_spec.contract.events import TokenLogprob
from llm_spec.kit.openai_logprobs import make_logprob_finite
from llm_spec.server.apis.fields import Body, Json, get_typed_field

__all__ = ["CompletionLogprobsBuilder", "get_requested_top_logprobs"]


def get_requested_top_logprobs(body: Body, *, is_requested: bool, requested_by: str) -> int | None:
    """A body's `top_logprobs`; None where it does not request log-probabilities; `requested_by` is how it would."""
    top_logprobs: int | None = get_typed_field(body, "top_logprobs", None, int)
    if is_requested:
        return top_logprobs or 0
    if top_logprobs:
        raise InvalidRequestError(f"top_logprobs is set; it needs {requested_by}")
    return None


class CompletionLogprobsBuilder:
    """The `logprobs` of a choice of a plain completion, whole or piece by piece; they say where each token begins."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def build_next(self, logprobs: Sequence[TokenLogprob] | None) -> Json | None:
        """Those of the next tokens; null where none were requested. A token is among the likeliest in its place."""
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
    """By text, likeliest first; of several tokens with one text (parts of characters) the likeliest."""
    top: dict[str, float] = {}
    for likely in (*logprob.top, logprob):
        top.setdefault(likely.token, make_logprob_finite(likely.logprob))
    return top
