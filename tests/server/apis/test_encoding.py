"""An answer's figures, in headers and in the trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.serving import frames_of

from llm_spec import ChatRequest, SpeculativeDecoder, SpeculativeResult, ToolCall, ToolCallDelta, Usage
from llm_spec.decoder.result import PLAIN_REASONS
from llm_spec.kit.json import dumps
from llm_spec.server.apis import APIS, AnswerEncodingContext
from llm_spec.server.apis.encoding import build_result_headers, describe_result_for_client, get_finish_reason
from llm_spec.server.apis.fields import ParsedRequest
from llm_spec.testing import RuleBasedProvider


@pytest.fixture
async def result() -> SpeculativeResult:
    return await SpeculativeDecoder(target=RuleBasedProvider(), draft=None).decode("Hi")


def test_a_speedup_is_told_where_it_was_measured(result: SpeculativeResult) -> None:
    """With a plain run beside it an answer says how much faster it was; without one it does not guess."""
    total_s = result.timings.total_s
    estimated = replace(result, plain_s=total_s * 2)
    headers = build_result_headers(replace(estimated, plain_range_s=(total_s * 1.5, total_s * 3)), 0.0)
    assert float(headers["x-llm-spec-speedup"]) == pytest.approx(2.0)
    assert headers["x-llm-spec-speedup-range"] == "1.500-3.000"
    for unmeasured in (result, estimated):
        assert not [name for name in build_result_headers(unmeasured, 0.0) if name.startswith("x-llm-spec-speedup")]


def test_the_reason_of_a_plain_answer_is_told(result: SpeculativeResult) -> None:
    """In a word of the documented list; not where something was speculated."""
    assert result.plain_reason in PLAIN_REASONS
    assert build_result_headers(result, 0.0)["x-llm-spec-plain-reason"] == "no_draft"
    assert "x-llm-spec-plain-reason" not in build_result_headers(replace(result, plain_reason=None), 0.0)


def test_overhead_is_in_milliseconds(result: SpeculativeResult) -> None:
    """The unit is the one in the header's name."""
    assert build_result_headers(result, 0.0125)["x-llm-spec-overhead-ms"] == "12.500"


def test_figures_tell_no_text_and_no_address(result: SpeculativeResult) -> None:
    """Why a draft was dropped is reported, but not its address."""
    reason = "TransientError: vllm:tiny at http://10.0.0.5:1/v1 broke the connection (ClientOSError: 10.0.0.5:1)"
    sent = describe_result_for_client(replace(result, fallbacks=(reason,), retries=(reason,)))
    assert sent["fallbacks"] == sent["retries"] == ["TransientError: vllm:tiny broke the connection"]
    assert "content" not in sent
    assert b"You said" not in dumps(sent)


def test_a_call_that_ended_with_stop_is_still_a_call(result: SpeculativeResult) -> None:
    """Some servers say `stop` behind a call, at which clients would not look for it."""
    assert get_finish_reason(result) == "stop"
    assert get_finish_reason(replace(result, tool_calls=(ToolCall("c", "f", "{}"),))) == "tool_calls"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_calls_that_are_written_at_the_same_time(path: str, result: SpeculativeResult) -> None:
    """Pieces that alternate become one block or item for each call, with its name, and none is torn apart."""
    asked = ParsedRequest(model="m", request=ChatRequest.create("q"))
    create_encoder = APIS[path].create_encoder(
        asked, AnswerEncodingContext(answer_id="a", model="m", trace=False, started_s=0.0)
    )
    pieces = [ToolCallDelta(n, f"call_{n}", f"tool_{n}") for n in (0, 1)]
    pieces += [ToolCallDelta(n, arguments=text) for text in ('{"x": ', "1}") for n in (0, 1)]
    calls = tuple(ToolCall(f"call_{n}", f"tool_{n}", '{"x": 1}') for n in (0, 1))
    ended = replace(result, content="", tool_calls=calls, finish_reason="tool_calls")
    sent = (
        create_encoder.encode_start()
        + b"".join(map(create_encoder.encode_event, pieces))
        + create_encoder.encode_end(ended)
    )
    frames = [frame.data for frame in frames_of(sent)]
    if path == "/v1/messages":
        begun = [frame["content_block"]["name"] for frame in frames if frame["type"] == "content_block_start"]
        written = ["", ""]
        for frame in frames:
            if frame["type"] == "content_block_delta":
                written[frame["index"]] += frame["delta"]["partial_json"]
    else:
        items = [frame["item"] for frame in frames if frame["type"] == "response.output_item.done"]
        begun, written = [item["name"] for item in items], [item["arguments"] for item in items]
    assert begun == ["tool_0", "tool_1"]
    assert written == ['{"x": 1}'] * 2


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/chat/completions", ("prompt_tokens", "completion_tokens", "prompt_tokens_details")),
        ("/v1/responses", ("input_tokens", "output_tokens", "input_tokens_details")),
        ("/v1/messages", ("input_tokens", "output_tokens", None)),
    ],
)
def test_usage_is_that_of_the_prompt_and_the_answer(
    path: str, names: tuple[str, str, str | None], result: SpeculativeResult
) -> None:
    """What speculation reads and writes beside them is in no client's figures: they make a throughput of these."""
    usage = Usage(
        input_tokens=500,
        extra_input_tokens=480,
        cached_input_tokens=490,
        cache_write_input_tokens=30,
        output_tokens=97,
        cancelled_output_tokens=37,
    )
    context = AnswerEncodingContext(answer_id="a", model="m", trace=False, started_s=0.0)
    parsed = ParsedRequest(model="m", request=ChatRequest.create("q"))
    sent = APIS[path].build_body([replace(result, usage=usage)], [parsed], context)["usage"]
    num_input, num_output, details = names
    assert sent[num_output] == 60
    if details is None:  # there the cached ones are not among the others
        assert (
            sent[num_input],
            sent["cache_read_input_tokens"],
            sent["cache_creation_input_tokens"],
        ) == (0, 10, 10)
    else:
        assert (sent[num_input], sent[details]["cached_tokens"]) == (20, 10)
        assert sent["total_tokens"] == 80
