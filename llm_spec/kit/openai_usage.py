"""The `usage` of chat completions, in the words of OpenAI and of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

from llm_spec.contract.events import Usage
from llm_spec.kit.json import MAX_INT
from llm_spec.kit.token_counts import read_token_count

__all__ = ["clean_usage", "parse_usage"]

_Path: TypeAlias = tuple[str, ...]

# Where servers tell these counts; the first that is one stands
_CACHED: Final[tuple[_Path, ...]] = (
    ("prompt_tokens_details", "cached_tokens"),
    ("prompt_cache_hit_tokens",),  # DeepSeek
    ("cached_tokens",),  # Moonshot, Together
    ("num_cached_tokens",),  # Mistral
    ("cache_read_input_tokens",),  # gateways to Anthropic
    ("prompt_tokens_details", "cache_read_input_tokens"),
    ("input_tokens_details", "cached_tokens"),
    ("cached_content_token_count",),  # gateways to Gemini
)
_CACHE_WRITES: Final[tuple[_Path, ...]] = (
    ("cache_creation_input_tokens",),
    ("prompt_tokens_details", "cache_creation_input_tokens"),
    ("prompt_tokens_details", "cache_creation_tokens"),
    ("prompt_tokens_details", "cache_write_tokens"),
)
_REASONING: Final[tuple[_Path, ...]] = (("completion_tokens_details", "reasoning_tokens"), ("reasoning_tokens",))
_EMPTY: Final[Mapping[str, Any]] = {}


def parse_usage(chunk: Mapping[str, Any]) -> Usage | None:
    """The token counts of a chunk; None where it has none that can be used.

    Those of the prompt and the answer must be counts (one follows from the total). Details that are none, or more than
    what they are a part of, are left out.
    """
    counts = _as_object_or_empty(chunk.get("usage"))
    num_input, num_output, total = (
        read_token_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if num_output is None and counts.get("completion_tokens") is None and None not in (num_input, total):
        num_output = max(0, cast("int", total) - cast("int", num_input))
    if num_input is None or num_output is None or not (num_input or num_output):  # all 0: it does not count
        return None
    answer = _as_object_or_empty(counts.get("completion_tokens_details"))
    num_rejected = _limit(read_token_count(answer.get("rejected_prediction_tokens")), num_output)
    num_cached = _limit(_find_count(counts, _CACHED), num_input)
    num_thought = max(num_output, (total or 0) - num_input)  # some servers leave reasoning out of the answer's tokens
    return Usage(
        input_tokens=num_input,
        output_tokens=num_output,
        cached_input_tokens=num_cached,
        cache_write_input_tokens=_limit(_find_count(counts, _CACHE_WRITES), num_input - num_cached),
        reasoning_tokens=_limit(_find_count(counts, _REASONING), num_thought),
        accepted_prediction_tokens=_limit(read_token_count(answer.get("accepted_prediction_tokens")), num_output),
        rejected_prediction_tokens=num_rejected,
        cancelled_output_tokens=num_rejected,  # which are counted as output
    )


def clean_usage(chunk: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `usage` of a chunk without what is no count, for those who read it as it is; None as by `parse_usage`."""
    parsed = parse_usage(chunk)
    if parsed is None:
        return None
    total = parsed.input_tokens + parsed.output_tokens
    counts = {"completion_tokens": parsed.output_tokens, "total_tokens": total}
    told = _drop_wrong_counts(chunk["usage"])
    return {**counts, **{name: value for name, value in told.items() if name not in counts or value is not None}}


def _drop_wrong_counts(fields: Mapping[str, Any], *, are_details: bool = False) -> dict[str, Any]:
    """The fields of a usage without what is no count, where one is meant; details are numbers alone."""
    cleaned: dict[str, Any] = {}
    for name, value in fields.items():
        has_details, is_count = name.endswith("_details"), name.endswith(("_tokens", "_token_count"))
        if value is None:
            cleaned[name] = None
        elif is_count:
            if (count := read_token_count(value)) is not None:
                cleaned[name] = count
        elif isinstance(value, dict):
            cleaned[name] = _drop_wrong_counts(value, are_details=are_details or has_details)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not has_details and 0 <= value <= MAX_INT:
                cleaned[name] = value
        elif not has_details and not are_details:
            cleaned[name] = value
    return cleaned


def _find_count(counts: Mapping[str, Any], paths: tuple[_Path, ...]) -> int | None:
    """The first of several that is a count, and not 0."""
    for *outer, name in paths:
        fields = counts
        for field in outer:
            fields = _as_object_or_empty(fields.get(field))
        if count := read_token_count(fields.get(name)):
            return count
    return None


def _limit(count: int | None, whole: int) -> int:
    """A count of a part; 0 for one that is more than the whole, which nobody can believe."""
    return count if count is not None and count <= whole else 0


def _as_object_or_empty(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else _EMPTY
