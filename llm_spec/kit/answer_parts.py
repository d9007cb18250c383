"""Parts of a server's answer: counts, usage, how it ended, and what this library does not read. Pure.

For how an answer ended OpenAI has five words; servers and gateways add their own, or pass on those of the model's
vendor. Upper and lower case, blanks, hyphens and underscores make no difference: `MAX_TOKENS`, `maxTokens` and
`max-tokens` are one word.

A word that is in none of these lists is read as `length`. The text is there, and nobody says that it is all of it: as
`stop` an agent would take half an answer for a whole one, and as a failure every answer of a server with a new word
would be asked for again, and lost.
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
    """A server's answer has broken off, or cannot be read; the message says how, and belongs behind the server's name.

    `reported` is the error object of the server, where it sent one. `is_transient`: the same request may succeed later.
    """

    def __init__(self, message: str, *, reported: object = None, is_transient: bool = False) -> None:
        super().__init__(message)
        self.reported = reported
        self.is_transient = is_transient


def read_token_count(value: object) -> int | None:
    """An integer from 0 to 2**53, also one with a point (`5.0`); None for anything else, true and false among it."""
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
_NOT_ENDED: Final = frozenset({"null", "none", "notfinished"})  # DashScope and watsonx, before the end
_SEPARATORS: Final = re.compile(r"[\s_-]+")
_REASONS: Final[Mapping[str, ReadFinishReason]] = {
    word.replace("_", ""): reason for reason, words in _WORDS.items() for word in words.split()
}


def read_finish_reason(word: object) -> ReadFinishReason | None:
    """What a `finish_reason` means; None where it says nothing (null, an empty text), `failed` where it broke off."""
    if not word:
        return None
    if not isinstance(word, str):
        return "length"
    plain_word = _SEPARATORS.sub("", word).lower()
    return None if plain_word in _NOT_ENDED else _REASONS.get(plain_word, "length")


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


Json: TypeAlias = dict[str, Any]

_JOINED_FIELDS: Final = ("arguments", "data", "transcript")  # of an object: texts that come in pieces


def merge_detail(message: Json, detail: Mapping[str, Any]) -> None:
    """Add a piece to a message: lists and texts grow, objects get what is new."""
    for name, value in detail.items():
        message[name] = merge_detail_value(message.get(name), value)


def merge_detail_value(merged: object, value: object) -> object:
    """A field of a message with one more piece of it."""
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
