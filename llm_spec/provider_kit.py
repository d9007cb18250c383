"""What providers may use of this library besides its public names and `llm_spec.contract`.

Addresses
- `parse_server_address`: a `ServerAddress`, whose credentials and query are apart, or a ConfigError.
- `strip_credentials`: a text without the users and passwords of its addresses.
- `find_proxy`: the `Proxy` that the environment names for an address.

HTTP errors
- `make_status_error`: the error for a response's status, headers and message.
- `find_reported_error`: what a server reports in place of an answer; `get_error_words`: its words,
  `read_stream_error_status`: the status that it stands for.
- `get_status_advice`: what to do about a status, and where a redirect leads.
- `mask_secrets`: a text without the given keys.

Headers
- `get_session_headers`: what each call for the present answer has in its headers (`SpeculativeConfig.session_header`).

Event loops and clocks
- `PerLoopResource`: a client for each event loop that uses the provider.
- `OpenCalls`: the calls under way, which end with one error when the provider is closed.
- `SingleLoopGuard`: reports a client that only one event loop may use.
- `now`: the running event loop's clock, in seconds. Tests can replace it.

JSON and chunks
- `loads`, `dumps`: JSON by orjson where it is installed.
- `ChunkReader`: the events of chunks as OpenAI's chat API streams them. `ReadTokenIds` is what reads ids from a choice.
  `create_chunk_reader`: one for a request. What it cannot read it raises as `BrokenAnswerError`.
- `ChunkNormalizer`, `create_chunk_normalizer`: such chunks in the API's own form, for `ChunkStreaming`.
- `read_token_count`: a count of tokens, if it is one.
- `read_finish_reason`: what a server calls the end of its answer, in this library's words.
- `ToolCallReader`: the tool calls of an answer from their pieces.
- `SurrogateJoiner`: joins halves of characters that come apart; `is_encodable`: whether a text has none.
- `build_logprob_fields`: what such a body says for `ChatRequest.top_logprobs`.
- `parse_finish_reason`: why a choice of a chunk ended.
- `ChatResponseBuilder`: a response from the events of a stream.

Waiting
- `SERVER_FIRST_CHUNK_S`, `VENDOR_FIRST_CHUNK_S`: how long the first piece of an answer is waited for.

Types of chat
- `ContentPart`, `FinishReason`, `StoppedBy`.

Requests
- `find_constrained_part`: what of an answer a server's constrained decoding holds to a form.
- `find_message_parts`: what an answer may have beside text.
- `FIELDS`: the table of fields that clients send, by name; `is_default_value`: whether a field says nothing.
- `place_later_system_texts`: texts of the system after the first answer, as texts of another role in their place.

Server features
- `ContinuationTest`: whether a server continues an assistant's text.

Local models
- `ChatTemplate`: messages to the text of a prompt (needs the package jinja2).
- `ControlTokenFinder`: where the prefix of an answer spells a control token, which is text there.
- `make_context_length_error`: the error for a prompt that is too long.
- `FolderTokenizer`: the tokenizer and chat template of a model folder (needs the packages tokenizers and jinja2).
- `MessageFormat`, `ReasoningMarks`, `list_format_marks`: how a model writes calls and reasoning, and the marks in that.
- `find_file`, `read_json`: files of a model folder, with errors that name them.
- `prefill_prompt`: reads a prompt into a session, piece by piece, `PREFILL_CHUNK_TOKENS` at a time.
- `KeptTokens`: the tokens that a cache keeps, and how many of them another answer may begin with;
  `choose_idle_cache`: which of several caches to take for a prompt.
- `TokenModelProvider`: the provider around a token model; a provider of your own inherits from it.
- `count_usable_cores`: cores that this process may use.
- `run_pass`: where a forward pass runs that several threads compute; `call_in_own_thread`: what else they compute.
- `reset_in_forked_child`: what has locks, or counts requests under way, begins anew in a forked process;
  `leave_to_parent`: what the parent has open is never finalized there.
- `MAX_LOOKAHEAD`: the most tokens that are drafted in one round.

Sampling on a device
- `philox4x32`, `NoisePurpose`, `NOISE_GROUP_SIZE`: the random numbers of coupled sampling, what each of them is drawn
  for, and how many tokens share the draw of their largest noise.
- `is_greedy`, `needs_no_penalties`: what a `Sampling` asks for.

Options
- `check_number`: refuses a number that is out of range, in one form of words.
- `parse_query_options`: what stands after the question mark in a model's string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_spec._lazy import make_lazy_exports

if TYPE_CHECKING:
    from llm_spec._checks import check_number
    from llm_spec._clock import now
    from llm_spec.addresses import ServerAddress, parse_server_address, strip_credentials
    from llm_spec.broken_answer import BrokenAnswerError
    from llm_spec.chat import ContentPart, FinishReason, StoppedBy
    from llm_spec.chat_response import ChatResponseBuilder
    from llm_spec.continuation import ContinuationTest
    from llm_spec.contract.chat import SERVER_FIRST_CHUNK_S, VENDOR_FIRST_CHUNK_S
    from llm_spec.cores import count_usable_cores
    from llm_spec.errors import make_context_length_error
    from llm_spec.event_loops import PerLoopResource, SingleLoopGuard
    from llm_spec.finish_reasons import read_finish_reason
    from llm_spec.forks import leave_to_parent, reset_in_forked_child
    from llm_spec.json_text import dumps, loads
    from llm_spec.kept_tokens import PREFILL_CHUNK_TOKENS, KeptTokens, choose_idle_cache
    from llm_spec.message_format.formats import MessageFormat, ReasoningMarks, list_format_marks
    from llm_spec.model_folder.chat_template import ChatTemplate
    from llm_spec.model_folder.control_tokens import ControlTokenFinder
    from llm_spec.model_folder.files import find_file, read_json
    from llm_spec.model_folder.tokenizer import FolderTokenizer
    from llm_spec.open_calls import OpenCalls
    from llm_spec.openai_calls import ToolCallReader
    from llm_spec.openai_chat import ChunkReader, ReadTokenIds, create_chunk_reader, parse_finish_reason
    from llm_spec.openai_chunks import ChunkNormalizer, create_chunk_normalizer
    from llm_spec.openai_logprobs import build_logprob_fields
    from llm_spec.pass_threads import run_pass
    from llm_spec.prefill import prefill_prompt
    from llm_spec.proxies import Proxy, find_proxy
    from llm_spec.query_options import parse_query_options
    from llm_spec.request_fields import FIELDS, is_default_value
    from llm_spec.session_headers import get_session_headers
    from llm_spec.status_errors import (
        find_reported_error,
        get_error_words,
        get_status_advice,
        make_status_error,
        mask_secrets,
        read_stream_error_status,
    )
    from llm_spec.surrogates import SurrogateJoiner, is_encodable
    from llm_spec.system_texts import place_later_system_texts
    from llm_spec.token_counts import read_token_count
    from llm_spec.token_model_provider import TokenModelProvider
    from llm_spec.tokens.lookahead import MAX_LOOKAHEAD
    from llm_spec.tokens.noise import NOISE_GROUP_SIZE, NoisePurpose
    from llm_spec.tokens.philox import philox4x32
    from llm_spec.tokens.sampling import is_greedy, needs_no_penalties
    from llm_spec.tools import find_constrained_part, find_message_parts
    from llm_spec.worker import call_in_own_thread

__all__ = [
    "FIELDS",
    "MAX_LOOKAHEAD",
    "NOISE_GROUP_SIZE",
    "PREFILL_CHUNK_TOKENS",
    "SERVER_FIRST_CHUNK_S",
    "VENDOR_FIRST_CHUNK_S",
    "BrokenAnswerError",
    "ChatResponseBuilder",
    "ChatTemplate",
    "ChunkNormalizer",
    "ChunkReader",
    "ContentPart",
    "ContinuationTest",
    "ControlTokenFinder",
    "FinishReason",
    "FolderTokenizer",
    "KeptTokens",
    "MessageFormat",
    "NoisePurpose",
    "OpenCalls",
    "PerLoopResource",
    "Proxy",
    "ReadTokenIds",
    "ReasoningMarks",
    "ServerAddress",
    "SingleLoopGuard",
    "StoppedBy",
    "SurrogateJoiner",
    "TokenModelProvider",
    "ToolCallReader",
    "build_logprob_fields",
    "call_in_own_thread",
    "check_number",
    "choose_idle_cache",
    "count_usable_cores",
    "create_chunk_normalizer",
    "create_chunk_reader",
    "dumps",
    "find_constrained_part",
    "find_file",
    "find_message_parts",
    "find_proxy",
    "find_reported_error",
    "get_error_words",
    "get_session_headers",
    "get_status_advice",
    "is_default_value",
    "is_encodable",
    "is_greedy",
    "leave_to_parent",
    "list_format_marks",
    "loads",
    "make_context_length_error",
    "make_status_error",
    "mask_secrets",
    "needs_no_penalties",
    "now",
    "parse_finish_reason",
    "parse_query_options",
    "parse_server_address",
    "philox4x32",
    "place_later_system_texts",
    "prefill_prompt",
    "read_finish_reason",
    "read_json",
    "read_stream_error_status",
    "read_token_count",
    "reset_in_forked_child",
    "run_pass",
    "strip_credentials",
]

_NAMES_BY_MODULE: Final = {
    "llm_spec._checks": "check_number",
    "llm_spec._clock": "now",
    "llm_spec.addresses": "ServerAddress parse_server_address strip_credentials",
    "llm_spec.broken_answer": "BrokenAnswerError",
    "llm_spec.chat": "ContentPart FinishReason StoppedBy",
    "llm_spec.chat_response": "ChatResponseBuilder",
    "llm_spec.contract.chat": "SERVER_FIRST_CHUNK_S VENDOR_FIRST_CHUNK_S",
    "llm_spec.continuation": "ContinuationTest",
    "llm_spec.cores": "count_usable_cores",
    "llm_spec.errors": "make_context_length_error",
    "llm_spec.event_loops": "PerLoopResource SingleLoopGuard",
    "llm_spec.finish_reasons": "read_finish_reason",
    "llm_spec.forks": "leave_to_parent reset_in_forked_child",
    "llm_spec.json_text": "dumps loads",
    "llm_spec.kept_tokens": "PREFILL_CHUNK_TOKENS KeptTokens choose_idle_cache",
    "llm_spec.message_format.formats": "MessageFormat ReasoningMarks list_format_marks",
    "llm_spec.model_folder.chat_template": "ChatTemplate",
    "llm_spec.model_folder.control_tokens": "ControlTokenFinder",
    "llm_spec.model_folder.files": "find_file read_json",
    "llm_spec.model_folder.tokenizer": "FolderTokenizer",
    "llm_spec.open_calls": "OpenCalls",
    "llm_spec.openai_calls": "ToolCallReader",
    "llm_spec.openai_chat": "ChunkReader ReadTokenIds create_chunk_reader parse_finish_reason",
    "llm_spec.openai_chunks": "ChunkNormalizer create_chunk_normalizer",
    "llm_spec.openai_logprobs": "build_logprob_fields",
    "llm_spec.pass_threads": "run_pass",
    "llm_spec.prefill": "prefill_prompt",
    "llm_spec.proxies": "Proxy find_proxy",
    "llm_spec.query_options": "parse_query_options",
    "llm_spec.request_fields": "FIELDS is_default_value",
    "llm_spec.session_headers": "get_session_headers",
    "llm_spec.status_errors": (
        "find_reported_error get_error_words get_status_advice make_status_error mask_secrets read_stream_error_status"
    ),
    "llm_spec.surrogates": "SurrogateJoiner is_encodable",
    "llm_spec.system_texts": "place_later_system_texts",
    "llm_spec.token_counts": "read_token_count",
    "llm_spec.token_model_provider": "TokenModelProvider",
    "llm_spec.tokens.lookahead": "MAX_LOOKAHEAD",
    "llm_spec.tokens.noise": "NOISE_GROUP_SIZE NoisePurpose",
    "llm_spec.tokens.philox": "philox4x32",
    "llm_spec.tokens.sampling": "is_greedy needs_no_penalties",
    "llm_spec.tools": "find_constrained_part find_message_parts",
    "llm_spec.worker": "call_in_own_thread",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = make_lazy_exports(__name__, _NAMES_BY_MODULE)
