"""Log-probabilities in what `llm` logs of an answer: those of the decoder."""

from __future__ import annotations

import pytest

pytest.importorskip("llm")

from llm_spec import SpeculativeDecoder
from llm_spec.integrations.llm_plugin import ModelSpec, SpeculativeModel
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

CODE = "def test_spawnl(self):"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_them(stream: bool) -> None:
    async with SpeculativeDecoder(target="builtin:target", draft=None) as decoder:
        plain = await decoder.decode(CODE, max_tokens=12, top_logprobs=2)
    model = SpeculativeModel(ModelSpec(name="pair", target="builtin:target", draft="lookup+builtin:draft"))
    response = model.prompt(CODE, stream=stream, max_tokens=12, top_logprobs=2)
    assert response.text() == plain.content
    assert response.response_json["logprobs"] == {"content": convert_logprobs_to_openai(plain.logprobs)}
    without = model.prompt(CODE, stream=stream, max_tokens=12)
    assert without.text()
    assert "logprobs" not in without.response_json
