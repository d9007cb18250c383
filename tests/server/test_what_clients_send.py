"""What clients of these APIs have been seen to send, or to need of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from llm_spec import ChatRequest, InvalidRequestError, ToolCallDelta
from llm_spec.server.apis.chat_completions import parse_chat_request
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.server.apis.relay import ChunkMerger, rewrite_chunk_for_client
from llm_spec.server.apis.responses_encoder import ResponsesStreamEncoder
from llm_spec.testing import RuleBasedProvider


def read(*, is_local: bool = False, **fields: Any) -> ChatRequest:
    body = {"model": "fast", "messages": [{"role": "user", "content": "Good morning"}], **fields}
    return parse_chat_request(body, is_local=is_local).request


def test_no_token_at_all_goes_to_a_server_as_it_is() -> None:
    """openai-python's tests send `max_tokens` 0; some servers read the prompt alone then."""
    request = read(max_completion_tokens=0)
    assert (request.max_tokens, request.extra) == (None, {"max_tokens": 0})
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        read(max_completion_tokens=0, is_local=True)


async def test_the_rule_model_says_nothing_where_no_token_is_wanted() -> None:
    answer = await RuleBasedProvider().complete(ChatRequest.create("Good morning", extra={"max_tokens": 0}))
    assert (answer.content, answer.finish_reason) == ("", "length")


def test_biases_of_other_names_go_to_a_server_as_they_are() -> None:
    """openai-python's tests send one for "foo"."""
    assert read(logit_bias={"foo": 0}).extra == {"logit_bias": {"foo": 0}}
    assert read(logit_bias={"5": 1}).sampling.logit_bias == {5: 1}
    assert read(logit_bias={"foo": 0}, is_local=True).sampling.logit_bias == {}  # says nothing
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        read(logit_bias={"foo": 1}, is_local=True)


def test_a_top_p_of_0_leaves_one_token() -> None:
    """OpenAI's API takes it, and it is in its published schema."""
    top_p = read(top_p=0).sampling.top_p
    assert top_p is not None
    assert 0 < top_p < 1e-3


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_that_is_none(top_k: int) -> None:
    """Servers that have a default know it as the word for no such bound; here there is none to begin with."""
    asked = read(top_k=top_k)
    assert (asked.sampling.top_k, asked.extra) == (None, {"top_k": top_k})
    asked = read(top_k=top_k, is_local=True)
    assert (asked.sampling.top_k, asked.extra) == (None, {})
    with pytest.raises(InvalidRequestError, match="top_k is -2"):
        read(top_k=-2)


def test_an_empty_stop_string_is_none() -> None:
    assert read(stop="").stop == ()


def test_a_whole_number_may_have_a_point() -> None:
    """JSON has one kind of numbers."""
    assert read(max_tokens=8.0).max_tokens == 8
    with pytest.raises(InvalidRequestError, match="max_tokens is of type float"):
        read(max_tokens=8.5)


def test_a_format_whose_schema_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="schema is of type list; it must be an object"):
        read(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": [None]}})


def test_log_probabilities_have_both_lists() -> None:
    """The published schema wants `refusal` too; vLLM leaves it out."""
    token = {"token": "a", "logprob": 0.0, "bytes": None, "top_logprobs": []}
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [token]}}]}
    told = rewrite_chunk_for_client(chunk, answer_id="x", model="fast", include_usage=False)
    assert told is not None
    assert told["choices"][0]["logprobs"] == {"content": [token], "refusal": None}
    merger = ChunkMerger()
    merger.add_chunk(chunk)
    merger.add_chunk(chunk)
    whole = merger.build_response_body(answer_id="x", model="fast", kind="chat.completion")
    assert whole["choices"][0]["logprobs"] == {"content": [token, token], "refusal": None}


def test_a_streamed_call_of_responses_ends() -> None:
    """Every client of the responses API reads the call's name in the event that ends it."""
    asked = ParsedRequest(model="fast", request=read())
    encoder = ResponsesStreamEncoder(asked, answer_id="x", model="fast")
    encoder.encode_event(ToolCallDelta(0, "call_0", "get_weather", "{}"))
    told = encoder._output.end()
    assert [name for name, _ in told] == ["response.function_call_arguments.done", "response.output_item.done"]
    assert (told[0][1]["name"], told[0][1]["arguments"]) == ("get_weather", "{}")
