"""Parts of a server's answer: counts, usage, finish reasons, and unread details. Pure.

OpenAI has five finish reasons. Servers and gateways add their own, or pass on those of the model's
vendor. Upper and lower case, blanks, hyphens and underscores make no difference: `MAX_TOKENS`,
`maxTokens` and `max-tokens` are the same.

An unknown finish reason is read as `length`. The text is there, but it may be incomplete. Read as
`stop`, half an answer would look complete to an agent. Read as a failure, every answer of a server
with a new finish reason would be retried and lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, cast

from llm_spec.contract.events import FinishReason, Usage
from llm_spec.kit.json import MAX_INT

__all__ = [
    "BrokenAnswerError",
    "ReadFinishReason",
    "clean_usage",
    "merge_detail",
    "merge_detail_value",
    "parse_usage",
    "read_finish_reason",
    "read_token_count",
]


class BrokenAnswerError(ValueError):
    """A server's answer has broken off, or cannot be read.

    The message says how; put the server's name in front of it.

    `reported`: the server's error object, or None if it sent none.
    `is_transient`: True if the same request may succeed later.
    """

    def __init__(self, message: str, *, reported: object = None, is_transient: bool = False) -> None:
        super().__init__(message)
        self.reported = reported
        self.is_transient = is_transient


def read_token_count(value: object) -> int | None:
    """Return an integer from 0 to 2**53, or None for any other value.

    A float such as `5.0` is accepted, a boolean is not.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INT:
        return None
    return value


ReadFinishReason: TypeAlias = FinishReason | Literal["failed"]

_WORDS: Final[Mapping[ReadFinishReason, str]] = {
    "stop": """
        stop stopped stop_sequence stop_string stop_string_found stop_token stop_word stop_words end end_of_text
        end_of_turn end_turn end_of_sequence eos eos_found eos_token complete completed finish finished done normal
        success word
    """,
    "length": """
        length length_capped limit max_length max_tokens max_tokens_reached max_output max_output_tokens
        max_output_reached max_completion_tokens max_new_tokens max_predicted_tokens_reached model_length
        model_context_window_exceeded context_length context_length_reached context_length_exceeded
        context_window_exceeded context_window context_limit token_limit token_limit_reached error_limit incomplete
        truncated time_limit pause_turn
    """,
    "tool_calls": "tool_calls tool_call tool_use tool function_call function_calls call",
    "content_filter": """
        content_filter content_filtered content_blocked content_policy_violation filter filtered blocked blocklist
        guardrail guardrails guardrail_intervened guardrail_intervention moderation sensitive safety recitation
        prohibited_content spii language refusal image_safety image_recitation image_prohibited_content error_toxic
        risk
    """,
    "failed": """
        abort aborted cancel cancelled canceled user_cancel user_canceled user_stopped error errored exception failed
        failure internal_error server_error engine_error engine_overloaded network_error insufficient_system_resource
        insufficient_resource insufficient_resources interrupted timeout timed_out deadline deadline_exceeded
        overloaded unavailable preempted disconnect disconnected model_unloaded unload out_of_memory
        oom malformed_function_call malformed_model_output malformed_response malformed_tool_use malformed_tool_call
        unexpected_tool_call too_many_tool_calls invalid_function_call missing_thought_signature
    """,
}
# DashScope and watsonx send these before the end
_NOT_ENDED: Final = frozenset({"null", "none", "notfinished"})
_SEPARATORS: Final = re.compile(r"[\s_-]+")
_REASONS: Final[Mapping[str, ReadFinishReason]] = {
    word.replace("_", ""): reason for reason, words in _WORDS.items() for word in words.split()
}


def read_finish_reason(word: object) -> ReadFinishReason | None:
    """Return the meaning of a server's `finish_reason`.

    Returns None if it says nothing (null, an empty text), and `failed` if the answer broke off.
    """
    if not word:
        return None
    if not isinstance(word, str):
        return "length"
    plain_word = _SEPARATORS.sub("", word).lower()
    return None if plain_word in _NOT_ENDED else _REASONS.get(plain_word, "length")


_Path: TypeAlias = tuple[str, ...]

# The fields in which servers report these counts; the first valid one is used
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
    """Return the token counts of a chunk, or None if it has no usable ones.

    The counts of prompt and answer must be valid (one of them can follow from the total). Details
    that are not counts, or exceed the whole, are left out.
    """
    counts = _as_object_or_empty(chunk.get("usage"))
    num_input, num_output, total = (
        read_token_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if num_output is None and counts.get("completion_tokens") is None and None not in (num_input, total):
        num_output = max(0, cast("int", total) - cast("int", num_input))
    # all 0: the server does not count
    if num_input is None or num_output is None or not (num_input or num_output):
        return None
    answer = _as_object_or_empty(counts.get("completion_tokens_details"))
    num_rejected = _limit(read_token_count(answer.get("rejected_prediction_tokens")), num_output)
    num_cached = _limit(_find_count(counts, _CACHED), num_input)
    # some servers leave reasoning out of the answer's tokens
    num_thought = max(num_output, (total or 0) - num_input)
    return Usage(
        input_tokens=num_input,
        output_tokens=num_output,
        cached_input_tokens=num_cached,
        cache_write_input_tokens=_limit(_find_count(counts, _CACHE_WRITES), num_input - num_cached),
        reasoning_tokens=_limit(_find_count(counts, _REASONING), num_thought),
        accepted_prediction_tokens=_limit(read_token_count(answer.get("accepted_prediction_tokens")), num_output),
        rejected_prediction_tokens=num_rejected,
        cancelled_output_tokens=num_rejected,  # the server counts them as output
    )


def clean_usage(chunk: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `usage` of a chunk without invalid counts, for clients that read it directly.

    Returns None if `parse_usage` does.
    """
    parsed = parse_usage(chunk)
    if parsed is None:
        return None
    total = parsed.input_tokens + parsed.output_tokens
    counts = {"completion_tokens": parsed.output_tokens, "total_tokens": total}
    told = _drop_wrong_counts(chunk["usage"])
    return {**counts, **{name: value for name, value in told.items() if name not in counts or value is not None}}


def _drop_wrong_counts(fields: Mapping[str, Any], *, are_details: bool = False) -> dict[str, Any]:
    """Drop values that should be counts and are not; details keep only numbers."""
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
    """Return the first of several fields that is a count other than 0."""
    for *outer, name in paths:
        fields = counts
        for field in outer:
            fields = _as_object_or_empty(fields.get(field))
        if count := read_token_count(fields.get(name)):
            return count
    return None


def _limit(count: int | None, whole: int) -> int:
    """Return the count of a part, or 0 if it exceeds the whole."""
    return count if count is not None and count <= whole else 0


def _as_object_or_empty(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else _EMPTY


Json: TypeAlias = dict[str, Any]

_JOINED_FIELDS: Final = ("arguments", "data", "transcript")  # texts that come in pieces


def merge_detail(message: Json, detail: Mapping[str, Any]) -> None:
    """Add a piece to a message: lists and texts grow, objects gain fields."""
    for name, value in detail.items():
        message[name] = merge_detail_value(message.get(name), value)


def merge_detail_value(merged: object, value: object) -> object:
    """Return a field of a message with one more piece of it."""
    if isinstance(merged, str) and isinstance(value, str):
        return merged + value
    if isinstance(merged, list) and isinstance(value, list):
        return [*cast("list[object]", merged), *cast("list[object]", value)]
    if not isinstance(merged, dict) or not isinstance(value, dict):
        return value
    fields, more = cast("Json", merged), cast("Json", value)
    joined: Json = {name: merge_detail_value(fields.get(name), more[name]) for name in _JOINED_FIELDS if name in more}
    kept: Json = {name: of for name, of in more.items() if of is not None}
    return fields | kept | joined
