"""Log-probabilities in the Agents SDK's output texts: those of the decoder, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents")

from agents import ModelSettings, ModelTracing
from openai.types.responses import Response, ResponseCompletedEvent, ResponseOutputMessage, ResponseOutputText

from llm_spec import SpeculativeDecoder
from llm_spec.integrations.openai_agents import SpeculativeModel
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

CODE = "def test_spawnl(self):"


def get_logprobs(output: Any) -> list[dict[str, Any]]:
    """Those of an output's only text."""
    [message] = output
    assert isinstance(message, ResponseOutputMessage)
    [text] = message.content
    assert isinstance(text, ResponseOutputText)
    return [logprob.model_dump() for logprob in text.logprobs or ()]


@pytest.mark.parametrize("top_logprobs", [0, 2])
async def test_output_texts_have_them(top_logprobs: int) -> None:
    async with SpeculativeDecoder(target="builtin:target", draft=None) as decoder:
        stop = [(await decoder.decode(CODE, max_tokens=24)).content[-4:]]  # an answer that is cut is an error there
        plain = await decoder.decode(CODE, max_tokens=48, stop=stop, top_logprobs=top_logprobs)
    settings = ModelSettings(max_tokens=48, top_logprobs=top_logprobs, extra_args={"stop": stop})
    model = SpeculativeModel("builtin:target", draft="lookup+builtin:draft")
    request: Any = (None, CODE, settings, [], None, [], ModelTracing.DISABLED)
    whole = await model.get_response(*request)
    completed: Response | None = None
    async for event in model.stream_response(*request):
        if isinstance(event, ResponseCompletedEvent):
            completed = event.response
    await model.close()
    expected = convert_logprobs_to_openai(plain.logprobs)
    assert plain.finish_reason == "stop"
    assert expected
    assert completed is not None
    for output in (whole.output, completed.output):
        for told, logprob in zip(get_logprobs(output), expected, strict=True):
            assert {name: told[name] for name in ("token", "logprob", "bytes")} == {
                name: logprob[name] or [] for name in ("token", "logprob", "bytes")
            }
            assert [likely["logprob"] for likely in told["top_logprobs"]] == [
                likely["logprob"] for likely in logprob["top_logprobs"]
            ]
