"""What servers call the end of an answer, in this library's words. Pure.

OpenAI has five words; servers and gateways add their own, or pass on those of the model's vendor. Upper and lower case,
blanks, hyphens and underscores make no difference: `MAX_TOKENS`, `maxTokens` and `max-tokens` are one word.

A word that is in none of these lists is read as `length`. The text is there, and nobody says that it is all of it: as
`stop` an agent would take half an answer for a whole one, and as a failure every answer of a server with a new word
would be asked for again, and lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from llm_spec.contract.events import FinishReason

__all__ = ["ReadFinishReason", "read_finish_reason"]

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
