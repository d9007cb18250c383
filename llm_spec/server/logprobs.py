"""Log-probabilities in the words of OpenAI's APIs: how bodies request them, how answers report them. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from llm_spec.chat import TokenLogprob
from llm_spec.errors import InvalidRequestError
from llm_spec.server.request_fields import Body, Json, get_field

__all__ = ["CompletionLogprobs", "build_chat_logprobs", "describe_logprobs", "get_top_logprobs"]

_IMPOSSIBLE: Final = -9999.0  # OpenAI's value for a token that is as good as impossible; JSON has no infinity


def get_top_logprobs(body: Body, *, is_requested: bool, requested_by: str) -> int | None:
    """A body's `top_logprobs`; None where it does not request log-probabilities; `requested_by` is how it would."""
    top_logprobs: int | None = get_field(body, "top_logprobs", None, int)
    if is_requested:
        return top_logprobs or 0
    if top_logprobs:
        raise InvalidRequestError(f"top_logprobs is set; it needs {requested_by}")
    return None


def describe_logprobs(logprobs: Sequence[TokenLogprob] | None) -> list[Json]:
    """The entries of chat completions and responses; of none an empty list."""
    return [
        {**_describe_token(logprob), "top_logprobs": [_describe_token(likely) for likely in logprob.top]}
        for logprob in logprobs or ()
    ]


def build_chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> Json | None:
    """The `logprobs` of a choice of chat; null where none were requested."""
    return None if logprobs is None else {"content": describe_logprobs(logprobs), "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a choice of a plain completion, whole or piece by piece; they say where each token begins."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def build_next(self, logprobs: Sequence[TokenLogprob] | None) -> Json | None:
        """Those of the next tokens; null where none were requested. A token is among the likeliest in its place."""
        if logprobs is None:
            return None
        tops = [_describe_top_tokens(logprob) for logprob in logprobs]
        return {
            "tokens": [logprob.token for logprob in logprobs],
            "token_logprobs": [_make_logprob_finite(logprob.logprob) for logprob in logprobs],
            "top_logprobs": tops if any(logprob.top for logprob in logprobs) else None,
            "text_offset": [self._advance_text_offset(logprob) for logprob in logprobs],
        }

    def _advance_text_offset(self, logprob: TokenLogprob) -> int:
        start = self._num_characters
        token_bytes = logprob.token.encode() if logprob.token_bytes is None else logprob.token_bytes
        self._num_characters += len(self._decoder.decode(token_bytes))
        return start


def _describe_top_tokens(logprob: TokenLogprob) -> dict[str, float]:
    """By text, likeliest first; of several tokens with one text (parts of characters) the likeliest."""
    top: dict[str, float] = {}
    for likely in (*logprob.top, logprob):
        top.setdefault(likely.token, _make_logprob_finite(likely.logprob))
    return top


def _describe_token(logprob: TokenLogprob) -> Json:
    token_bytes = None if logprob.token_bytes is None else list(logprob.token_bytes)
    return {"token": logprob.token, "logprob": _make_logprob_finite(logprob.logprob), "bytes": token_bytes}


def _make_logprob_finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
