"""The fields that a request may carry, as one table.

Each row says how a field affects the text of an answer. All code that decides by a field's name
reads it here: which requests speculate at a server, which fields a model in this process
understands, and which fields `llm-spec serve` passes on. docs/request-fields.md shows the same
table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from llm_spec.contract.checks import suggest_name

__all__ = [
    "EXTRA_FIELDS",
    "FIELDS",
    "LIMIT_FIELDS",
    "METADATA_FIELDS",
    "PASSED_FIELDS",
    "TABLE",
    "RequestFieldGroup",
    "allows_prediction",
    "describe_unknown_option",
    "find_local_field_refusal",
    "find_local_field_use",
    "is_default_value",
    "prevents_multi_call_answer",
]

# metadata: does not affect the text, and is sent with every call.
# kept: speculation supports it.
# plain: such a request is answered by one server call, without speculation.
ServerUse: TypeAlias = Literal["metadata", "kept", "plain"]
# own: a field of ChatRequest itself, or read as one by `llm-spec serve`; left_out in `extra`.
# left_out: an error in a program; `llm-spec serve` drops it and reports that.
# refused: an error in both.
LocalUse: TypeAlias = Literal["ignored", "own", "kept", "left_out", "refused"]


class RequestFieldGroup(NamedTuple):
    """Fields that are handled alike.

    `names`: the fields' names, separated by spaces.
    `apis`: the APIs that define them ("": some servers, frameworks or programs).
    `defaults`: values that have no effect.
    `is_passed`: True if `llm-spec serve` passes them to servers, unless it reads them itself.
    `is_limit`: True for other names of `max_tokens`.
    `with_prediction`: True if predicted outputs can be used with them.
    """

    names: str
    apis: str
    server: ServerUse
    local: LocalUse
    note: str
    defaults: tuple[Any, ...] = ()
    is_passed: bool = False
    is_limit: bool = False
    with_prediction: bool = True


_ALL: Final = "chat completions responses messages"
_OPENAI: Final = "chat completions responses"

TABLE: Final = (
    # What is requested
    RequestFieldGroup(
        "messages", "chat messages", "kept", "own", "the conversation, with earlier calls and their results"
    ),
    RequestFieldGroup(
        "input instructions", "responses", "kept", "own", "the conversation; items that need a memory are refused"
    ),
    RequestFieldGroup("system", "messages", "kept", "own", "a system message"),
    RequestFieldGroup("prompt", "completions responses", "kept", "own", "text to continue; a stored prompt is refused"),
    RequestFieldGroup("model", _ALL, "kept", "own", "chooses the model"),
    RequestFieldGroup("prefix", "", "kept", "own", "text that the answer continues, where a target can"),
    RequestFieldGroup("raw", "", "plain", "own", "a prompt without a chat template", (False,), with_prediction=False),
    # How tokens are drawn
    RequestFieldGroup(
        "temperature top_p min_p repetition_penalty", _ALL, "kept", "own", "the same for draft and target"
    ),
    RequestFieldGroup("top_k", "messages", "kept", "own", "the same for draft and target", (0, -1), is_passed=True),
    RequestFieldGroup(
        "logit_bias seed", "chat completions", "kept", "own", "the same for draft and target", is_passed=True
    ),
    RequestFieldGroup(
        "presence_penalty frequency_penalty",
        "chat completions",
        "plain",
        "own",
        "servers count penalties over what one call wrote",
        (0, 0.0),
        with_prediction=False,
    ),
    RequestFieldGroup(
        "allowed_token_ids bad_words dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
        "dry_sequence_breakers dynatemp_exponent dynatemp_range early_stopping epsilon_cutoff eta_cutoff ignore_eos "
        "include_stop_str_in_output length_penalty min_keep min_tokens mirostat mirostat_eta mirostat_tau no_stop_trim "
        "penalize_nl random_seed repeat_last_n repeat_penalty samplers skip_special_tokens smoothing_factor "
        "spaces_between_special_tokens stop_token_ids tfs_z top_a top_n_sigma typical_p xtc_probability xtc_threshold",
        "",
        "plain",
        "left_out",
        "engines' own options, which may depend on the text that a call has written",
        is_passed=True,
    ),
    # How long
    RequestFieldGroup(
        "max_tokens", "chat completions messages", "kept", "own", "the limit", is_passed=True, is_limit=True
    ),
    RequestFieldGroup(
        "max_completion_tokens", "chat", "kept", "own", "read as `max_tokens`", is_limit=True, with_prediction=False
    ),
    RequestFieldGroup("max_output_tokens", "responses", "kept", "own", "read as `max_tokens`", is_limit=True),
    RequestFieldGroup(
        "max_gen_len max_length max_new_tokens max_tokens_to_sample maxoutputtokens maxtokens n_predict num_predict "
        "options",
        "",
        "plain",
        "left_out",
        "other servers' limits, which some obey even if `max_tokens` is set; `options` is Ollama's",
        is_limit=True,
    ),
    RequestFieldGroup(
        "stop stop_sequences", "chat completions messages", "kept", "own", "looked for in the joined text"
    ),
    # Tools
    RequestFieldGroup(
        "tools",
        "chat responses messages",
        "plain",
        "own",
        "shown by the chat template; calls are read from the text; at a server that reads its own token ids, kept",
        with_prediction=False,
    ),
    RequestFieldGroup(
        "tool_choice",
        "chat responses messages",
        "kept",
        "own",
        "`none` shows no tools; a grammar enforces `required`, `any` and names",
    ),
    RequestFieldGroup(
        "parallel_tool_calls",
        "chat responses",
        "plain",
        "kept",
        "false: the answer ends with its first call",
        (True,),
        is_passed=True,
    ),
    RequestFieldGroup(
        "max_tool_calls", "responses", "metadata", "ignored", "counts hosted tools, of which there are none"
    ),
    RequestFieldGroup("functions", "chat", "plain", "refused", "replaced by `tools`", ([],), is_passed=True),
    RequestFieldGroup(
        "function_call", "chat", "plain", "refused", "replaced by `tool_choice`", ("auto", "none"), is_passed=True
    ),
    RequestFieldGroup("web_search_options", "chat", "plain", "refused", "a tool that a vendor runs"),
    RequestFieldGroup("mcp_servers", "messages", "plain", "refused", "tools that a vendor runs", ([],)),
    # The form of the answer
    RequestFieldGroup(
        "response_format",
        "chat",
        "plain",
        "own",
        "enforced by a grammar; at a server that reads its own token ids, kept while the answer reasons",
        ({"type": "text"},),
    ),
    RequestFieldGroup("text", "responses", "plain", "own", "its `format` is read as `response_format`"),
    RequestFieldGroup(
        "output_config", "messages", "plain", "own", "its `format` and `effort` are read", is_passed=True
    ),
    RequestFieldGroup("output_format", "messages", "plain", "own", "read as `response_format`", is_passed=True),
    RequestFieldGroup(
        "ebnf grammar guided_choice guided_grammar guided_json guided_regex json_schema regex structured_outputs",
        "",
        "plain",
        "refused",
        "engines' own names for `response_format`; use that",
        is_passed=True,
    ),
    RequestFieldGroup(
        "modalities", "chat", "plain", "refused", "a model here writes text", (["text"],), True, with_prediction=False
    ),
    RequestFieldGroup("audio", "chat", "plain", "refused", "a model here writes text", with_prediction=False),
    RequestFieldGroup("image", "responses", "plain", "refused", "a model here writes text"),
    RequestFieldGroup(
        "suffix", "completions", "plain", "refused", "text after a gap; the answer would have to meet it", ("",), True
    ),
    RequestFieldGroup(
        "echo", "completions", "plain", "own", "the server adds the prompt itself", (False,), is_passed=True
    ),
    RequestFieldGroup(
        "n",
        "chat completions",
        "plain",
        "refused",
        "relayed from the server",
        (1,),
        is_passed=True,
        with_prediction=False,
    ),
    RequestFieldGroup("best_of", "completions", "plain", "refused", "several answers, of which one is returned", (1,)),
    RequestFieldGroup(
        "logprobs",
        "chat completions",
        "plain",
        "own",
        "relayed from a server; in a program, use `top_logprobs`",
        (False,),
        is_passed=True,
        with_prediction=False,
    ),
    RequestFieldGroup(
        "top_logprobs",
        "chat responses",
        "plain",
        "own",
        "read while verifying; relayed from a server",
        (0,),
        is_passed=True,
        with_prediction=False,
    ),
    RequestFieldGroup("prediction", "chat", "kept", "own", "a guess at the answer: a draft, or passed to the server"),
    # Reasoning
    RequestFieldGroup(
        "reasoning_effort", "chat", "plain", "kept", "a variable of the chat template; `none`: no reasoning", (), True
    ),
    RequestFieldGroup(
        "reasoning", "responses", "plain", "kept", "its `effort` is read as `reasoning_effort`", ({},), True
    ),
    RequestFieldGroup(
        "thinking",
        "messages",
        "plain",
        "kept",
        "`enable_thinking` for the chat template; a budget is left to the model",
        ({"type": "disabled"},),
        is_passed=True,
    ),
    RequestFieldGroup("enable_thinking", "", "plain", "kept", "a variable of the chat template", is_passed=True),
    RequestFieldGroup("chat_template_kwargs", "", "plain", "kept", "variables of the chat template"),
    RequestFieldGroup("verbosity", "chat", "plain", "ignored", "models here have no such setting", ("medium",), True),
    RequestFieldGroup(
        "context_management include_reasoning prompt_mode reasoning_format safe_prompt thinking_budget",
        "",
        "plain",
        "left_out",
        "servers' own options for reasoning and for the context",
        is_passed=True,
    ),
    # How the answer is sent
    RequestFieldGroup("stream", _ALL, "metadata", "ignored", "whole or in pieces: the text is the same"),
    RequestFieldGroup("stream_options", _OPENAI, "metadata", "ignored", "usage at the end of a stream"),
    RequestFieldGroup("include_usage", "", "metadata", "ignored", "usage beside the answer", is_passed=True),
    RequestFieldGroup("usage", "", "metadata", "ignored", "usage beside the answer, as OpenRouter names it"),
    RequestFieldGroup("include", "responses", "metadata", "ignored", "what else is reported about an answer"),
    RequestFieldGroup(
        "return_token_ids return_tokens_as_token_ids timings_per_token",
        "",
        "plain",
        "left_out",
        "change how a server writes its chunks",
        (False,),
        is_passed=True,
    ),
    # Who asks, and how it is queued, billed, cached and stored
    RequestFieldGroup(
        "metadata",
        "chat responses messages",
        "metadata",
        "ignored",
        "labels",
        is_passed=True,
    ),
    RequestFieldGroup("user safety_identifier", _OPENAI, "metadata", "ignored", "who asks", is_passed=True),
    RequestFieldGroup(
        "store", "chat responses", "metadata", "ignored", "whether the vendor keeps the answer", is_passed=True
    ),
    RequestFieldGroup(
        "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "chat responses",
        "metadata",
        "ignored",
        "the server's cache",
        is_passed=True,
    ),
    RequestFieldGroup(
        "cache_control betas",
        "messages",
        "metadata",
        "ignored",
        "the server's cache; names of features",
        is_passed=True,
    ),
    RequestFieldGroup("cache_prompt cache_salt", "", "metadata", "ignored", "the server's cache", is_passed=True),
    RequestFieldGroup("service_tier", "chat responses messages", "metadata", "ignored", "which queue; may cost more"),
    RequestFieldGroup("speed", "messages", "metadata", "ignored", "which queue; may cost more"),
    RequestFieldGroup("priority", "", "metadata", "ignored", "which queue"),
    RequestFieldGroup(
        "billing_policy diagnostics fallback_credit_token inference_geo user_profile_id workspace_id",
        "messages",
        "metadata",
        "ignored",
        "who asks, who pays, where it runs",
    ),
    RequestFieldGroup(
        "truncation", "responses", "metadata", "ignored", "a conversation that is too long is an error here"
    ),
    # What needs a memory, or another model
    RequestFieldGroup(
        "background background_options conversation previous_response_id",
        "responses",
        "plain",
        "refused",
        "needs a server that keeps responses; send the whole input",
        (False,),
    ),
    RequestFieldGroup("compaction thread", "messages", "plain", "refused", "needs a server that keeps conversations"),
    RequestFieldGroup("container", "messages", "plain", "left_out", "where a vendor's tools run"),
    RequestFieldGroup("fallbacks", "messages", "plain", "left_out", "other models for the answer", ([],)),
    RequestFieldGroup(
        "access_programs moderation", _OPENAI, "plain", "left_out", "what else the vendor does with the text"
    ),
    RequestFieldGroup(
        "add_generation_prompt add_special_tokens continue_final_message",
        "",
        "plain",
        "left_out",
        "how a server turns messages into a prompt",
        is_passed=True,
    ),
    RequestFieldGroup("chat_template", "", "plain", "left_out", "a template is code; a model here has its own"),
)

FIELDS: Final[Mapping[str, RequestFieldGroup]] = {name: row for row in TABLE for name in row.names.split()}
# Fields that do not affect the answer: who asks, how the server queues, bills and caches
METADATA_FIELDS: Final = frozenset(name for name, row in FIELDS.items() if row.server == "metadata")
# Other servers' names of `max_tokens`; some servers obey them even if `max_tokens` is set
LIMIT_FIELDS: Final = frozenset(name for name, row in FIELDS.items() if row.is_limit)
# Fields that an adapter takes by name and puts into `ChatRequest.extra`
EXTRA_FIELDS: Final = frozenset(
    name for name, row in FIELDS.items() if row.local != "own" and not row.is_limit and row.apis
)
PASSED_FIELDS: Final = frozenset(name for name, row in FIELDS.items() if row.is_passed)
# Names in other APIs and engines of a program's own options
_OWN_OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(LIMIT_FIELDS - {"max_tokens", "options"}, "max_tokens"),
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "logprobs": "top_logprobs",
    "output_format": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
}
_OPTIONS_ELSEWHERE: Final[Mapping[str, str]] = {
    "stream": "call `stream` for an answer in pieces, `decode` for a whole one",
    "model": "the target is the model that answers",
    "messages": "messages come first, without a name",
    "system": "give a message with the role system",
    "timeout": "set `SpeculativeConfig(timeouts=…)` or `deadline_s`",
}


def describe_unknown_option(name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown request option, with the option to use instead."""
    start = f"unknown request option {name!r}"
    if name in _OWN_OPTIONS:
        return f"{start}; it is {_OWN_OPTIONS[name]} here"
    if name in _OPTIONS_ELSEWHERE:
        return f"{start}; {_OPTIONS_ELSEWHERE[name]}"
    if name in EXTRA_FIELDS or name in PASSED_FIELDS:
        return f"{start}; send it to a server as extra={{{name!r}: …}}"
    return start + (suggest_name(name, known) or f"; there are {', '.join(sorted(known))}")


def is_default_value(name: str, value: object) -> bool:
    """True if a field has no effect: it is null, an object of nulls, or a default."""
    if value is None:
        return True
    if isinstance(value, Mapping):
        value = {key: part for key, part in cast("Mapping[str, object]", value).items() if part is not None}
    row = FIELDS.get(name)
    return row is not None and any(value == known and type(value) is type(known) for known in row.defaults)


def prevents_multi_call_answer(name: str, value: object) -> bool:
    """True if a field in `extra` keeps an answer from being built from several server calls.

    This holds for every field that may change the text. Speculation reads the fields that it
    supports elsewhere.
    """
    return name not in METADATA_FIELDS and not is_default_value(name, value)


def find_local_field_use(name: str, value: object) -> LocalUse:
    """Return what a model in this process does with a field of `ChatRequest.extra`."""
    row = FIELDS.get(name)
    if is_default_value(name, value):
        return "ignored"
    return "left_out" if row is None or row.local == "own" else row.local


def find_local_field_refusal(name: str, value: object, target_name: str = "it") -> str | None:
    """Return why a local model refuses a field of `ChatRequest.extra`, or None if it does not."""
    if find_local_field_use(name, value) in ("ignored", "kept"):
        return None
    row = FIELDS.get(name)
    if row is not None and row.local == "own":
        own = _OWN_OPTIONS.get(name, name)
        read_as = "" if own == name else f", which is {own} here"
        return f"extra has {name}{read_as}, an option of its own; pass {own} outside extra ({row.note})"
    reason = "" if row is None else f" ({row.note})"
    return f"{name} is set; {target_name} is a local model and cannot serve it{reason}"


def allows_prediction(name: str, value: object) -> bool:
    """True if OpenAI documents predicted outputs for requests with this field."""
    row = FIELDS.get(name)
    is_reward = isinstance(value, int | float) and value < 0  # a negative penalty
    return row is None or row.with_prediction or is_reward or is_default_value(name, value)
