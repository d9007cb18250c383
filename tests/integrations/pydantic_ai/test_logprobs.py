"""Log-probabilities where pydantic-ai's own chat models give them: those of the decoder, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent

from llm_spec import SpeculativeDecoder
from llm_spec.integrations.pydantic_ai import SpeculativeModel
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

PROMPT = "def area(radius):"


@pytest.mark.parametrize("top_logprobs", [None, 2])
async def test_provider_details_have_them(top_logprobs: int | None) -> None:
    async with SpeculativeDecoder(target="builtin:target", draft=None) as decoder:
        plain = await decoder.decode(PROMPT, max_tokens=12, top_logprobs=top_logprobs or 0)
    settings: Any = {"max_tokens": 12, "openai_logprobs": True}
    if top_logprobs is not None:
        settings["openai_top_logprobs"] = top_logprobs
    async with Agent(SpeculativeModel("builtin:target", draft="lookup+builtin:draft")) as agent:
        whole = (await agent.run(PROMPT, model_settings=settings)).response
        async with agent.run_stream(PROMPT, model_settings=settings) as answer:
            await answer.get_output()
        without = (await agent.run(PROMPT, model_settings={"max_tokens": 12})).response
    expected = convert_logprobs_to_openai(plain.logprobs)
    assert len(expected) == 12
    for response in (whole, answer.response):
        assert response.provider_details is not None
        assert response.provider_details["strategy"] == "tokens"
        assert response.provider_details["logprobs"] == expected
    assert "logprobs" not in (without.provider_details or {})
