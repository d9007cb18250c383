"""Log-probabilities in OpenAI's words: requested in a body, read from a choice, written into an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, cast

from llm_spec.chat import ChatRequest, TokenLogprob

__all__ = [
    "build_chat_logprobs",
    "build_logprob_fields",
    "convert_logprobs_to_openai",
    "make_logprob_finite",
    "parse_logprobs",
]

_IMPOSSIBLE: Final = -9999.0  # OpenAI's value for a token that is as good as impossible; JSON has no infinity


def build_logprob_fields(request: ChatRequest) -> dict[str, Any]:
    """What a body says for `top_logprobs`; nothing where none are requested."""
    if request.top_logprobs is None:
        return {}
    if request.raw:
        return {"logprobs": request.top_logprobs}
    return {"logprobs": True, "top_logprobs": request.top_logprobs}


def parse_logprobs(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...] | None:
    """Those of a choice or of one chunk of it; None: it has none."""
    value = choice.get("logprobs")
    if not isinstance(value, dict):
        return None
    fields = cast("Mapping[str, Any]", value)
    if fields.get("tokens"):
        return tuple(_parse_completion_logprobs(fields))
    return tuple(_parse_logprob_entry(entry) for entry in cast("list[Mapping[str, Any]]", fields.get("content") or []))


def _parse_logprob_entry(entry: Mapping[str, Any]) -> TokenLogprob:
    token_bytes: Sequence[int] | None = entry.get("bytes")
    top = tuple(_parse_logprob_entry(likely) for likely in entry.get("top_logprobs") or ())
    return TokenLogprob(
        entry.get("token") or "", float(entry["logprob"]), None if token_bytes is None else bytes(token_bytes), top
    )


def _parse_completion_logprobs(fields: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    tops: Sequence[Mapping[str, float] | None] | None = fields.get("top_logprobs")
    for token, logprob, top in zip(fields["tokens"], fields["token_logprobs"], tops or repeat(None), strict=False):
        likely = sorted((top or {}).items(), key=lambda pair: -pair[1])
        if logprob is not None:  # a prompt's first token has none
            yield TokenLogprob(token, float(logprob), None, tuple(TokenLogprob(*pair) for pair in likely))


def convert_logprobs_to_openai(logprobs: Sequence[TokenLogprob] | None) -> list[dict[str, Any]]:
    """The entries of chat completions and responses; of none an empty list."""
    return [
        {
            **_convert_token_logprob_to_openai(logprob),
            "top_logprobs": [_convert_token_logprob_to_openai(likely) for likely in logprob.top],
        }
        for logprob in logprobs or ()
    ]


def build_chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """The `logprobs` of a choice of chat; null where none were requested."""
    return None if logprobs is None else {"content": convert_logprobs_to_openai(logprobs), "refusal": None}


def _convert_token_logprob_to_openai(logprob: TokenLogprob) -> dict[str, Any]:
    token_bytes = None if logprob.token_bytes is None else list(logprob.token_bytes)
    return {"token": logprob.token, "logprob": make_logprob_finite(logprob.logprob), "bytes": token_bytes}


def make_logprob_finite(logprob: float) -> float:
    """A log-probability as JSON can say it."""
    return max(logprob, _IMPOSSIBLE)
