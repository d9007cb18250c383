"""Log-probabilities in OpenAI's format: requested, read and written. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, cast

from llm_spec.contract.events import TokenLogprob
from llm_spec.contract.request import ChatRequest
from llm_spec.kit.answer_parts import BrokenAnswerError
from llm_spec.kit.json import MAX_INT
from llm_spec.kit.surrogates import mend_text

__all__ = [
    "build_chat_logprobs",
    "build_logprob_fields",
    "clean_logprobs",
    "convert_logprobs_to_openai",
    "make_logprob_finite",
    "parse_logprobs",
]

_IMPOSSIBLE: Final = -9999.0  # OpenAI's value for a nearly impossible token; JSON has no infinity


def build_logprob_fields(request: ChatRequest) -> dict[str, Any]:
    """Return the fields of a body that request `top_logprobs`; empty if none are requested."""
    if request.top_logprobs is None:
        return {}
    if request.raw:
        return {"logprobs": request.top_logprobs}
    return {"logprobs": True, "top_logprobs": request.top_logprobs}


def parse_logprobs(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...] | None:
    """Return the log-probabilities of a choice, or None if it has none.

    Raises BrokenAnswerError for invalid ones.
    """
    value = choice.get("logprobs")
    if not value:
        return None
    if not isinstance(value, dict):
        raise _build_type_error("logprobs", value)
    fields = cast("Mapping[str, Any]", value)
    if fields.get("tokens"):
        return tuple(_parse_completion_logprobs(fields))
    return tuple(map(_parse_logprob_entry, _check_list("logprobs.content", fields.get("content"))))


def _parse_logprob_entry(entry: object) -> TokenLogprob:
    if not isinstance(entry, dict):
        raise _build_type_error("an entry of logprobs", entry)
    fields = cast("Mapping[str, Any]", entry)
    token = fields.get("token")
    if not isinstance(token, str):
        raise _build_type_error("a token of logprobs", token)
    top = tuple(map(_parse_logprob_entry, _check_list("top_logprobs", fields.get("top_logprobs"))))
    return TokenLogprob(mend_text(token), _parse_number(fields.get("logprob")), _find_bytes(fields), top)


def _find_bytes(entry: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of a token, or None if they are missing or invalid."""
    value = entry.get("bytes")
    try:
        return bytes(cast("list[int]", value)) if isinstance(value, list) else None
    except (TypeError, ValueError):
        return None


def _parse_number(value: object) -> float:
    """Return a log-probability.

    One that is not finite becomes the value for nearly impossible tokens.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _build_type_error("a log-probability", value)
    return float(value) if abs(value) < -_IMPOSSIBLE else _IMPOSSIBLE


def _check_list(name: str, value: object) -> Sequence[Any]:
    if value is not None and not isinstance(value, list):
        raise _build_type_error(name, value)
    return cast("Sequence[Any]", value or ())


def _build_type_error(name: str, value: object) -> BrokenAnswerError:
    return BrokenAnswerError(f"sent {name} of type {type(value).__name__}")


def _parse_completion_logprobs(fields: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    tokens, logprobs = (_check_list(name, fields.get(name)) for name in ("tokens", "token_logprobs"))
    tops = _check_list("top_logprobs", fields.get("top_logprobs"))
    for token, logprob, top in zip(tokens, logprobs, tops or repeat(None), strict=False):
        if not isinstance(token, str):
            raise _build_type_error("a token of logprobs", token)
        if not isinstance(top, dict | None):
            raise _build_type_error("an entry of top_logprobs", top)
        if logprob is not None:  # a prompt's first token has none
            pairs = [(mend_text(text), _parse_number(of)) for text, of in cast("dict[str, Any]", top or {}).items()]
            likely = tuple(TokenLogprob(*pair) for pair in sorted(pairs, key=lambda pair: -pair[1]))
            yield TokenLogprob(mend_text(token), _parse_number(logprob), None, likely)


def clean_logprobs(choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice as valid JSON.

    Returns None if it has none, and `{}` if they cannot be read.
    """
    value = choice.get("logprobs")
    if not value:
        return None
    try:
        parse_logprobs(choice)
    except BrokenAnswerError:
        return {}
    return {name: _clean_value(name, of) for name, of in cast("Mapping[str, Any]", value).items()}


def _clean_value(name: str, value: object) -> Any:
    """Return a field with finite numbers and valid bytes."""
    if isinstance(value, dict):
        fields = cast("Mapping[str, Any]", value)
        return {mend_text(inner): _clean_value(inner, of) for inner, of in fields.items()}
    if name == "bytes":
        return None if (found := _find_bytes({"bytes": value})) is None else list(found)
    if isinstance(value, list):
        return [_clean_value("", each) for each in cast("list[object]", value)]
    if isinstance(value, float) or (isinstance(value, int) and abs(value) > MAX_INT):
        return value if abs(value) < -_IMPOSSIBLE else _IMPOSSIBLE
    return mend_text(value) if isinstance(value, str) else value


def convert_logprobs_to_openai(logprobs: Sequence[TokenLogprob] | None) -> list[dict[str, Any]]:
    """Return the entries of chat completions and responses; an empty list for None."""
    return [
        {
            **_convert_token_logprob_to_openai(logprob),
            "top_logprobs": [_convert_token_logprob_to_openai(likely) for likely in logprob.top],
        }
        for logprob in logprobs or ()
    ]


def build_chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice of chat; null if none were requested."""
    return None if logprobs is None else {"content": convert_logprobs_to_openai(logprobs), "refusal": None}


def _convert_token_logprob_to_openai(logprob: TokenLogprob) -> dict[str, Any]:
    token_bytes = None if logprob.token_bytes is None else list(logprob.token_bytes)
    return {"token": logprob.token, "logprob": make_logprob_finite(logprob.logprob), "bytes": token_bytes}


def make_logprob_finite(logprob: float) -> float:
    """Return a log-probability that JSON can express."""
    return max(logprob, _IMPOSSIBLE)
