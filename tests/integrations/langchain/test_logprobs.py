"""Log-probabilities where ChatOpenAI's messages have them: those of the decoder, whole and streamed."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core")

from llm_spec import SpeculativeDecoder
from llm_spec.integrations.langchain import SpeculativeChatModel
from llm_spec.kit.openai_logprobs import build_chat_logprobs

CODE = "def test_spawnl(self):"


@pytest.mark.parametrize("top_logprobs", [None, 2])
async def test_messages_have_them(top_logprobs: int | None) -> None:
    async with SpeculativeDecoder(target="builtin:target", draft=None) as decoder:
        plain = await decoder.decode(CODE, max_tokens=12, top_logprobs=top_logprobs or 0)
    async with SpeculativeChatModel(target="builtin:target", draft="lookup+builtin:draft", max_tokens=12) as model:
        whole = await model.ainvoke(CODE, logprobs=True, top_logprobs=top_logprobs)
        pieces = [piece async for piece in model.astream(CODE, logprobs=True, top_logprobs=top_logprobs)]
        without = await model.ainvoke(CODE)
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    assert whole.response_metadata["llm_spec"]["strategy"] == "tokens"
    expected = build_chat_logprobs(plain.logprobs)
    assert expected is not None
    assert len(expected["content"]) == 12
    assert whole.response_metadata["logprobs"]["content"] == expected["content"]
    assert streamed.response_metadata["logprobs"]["content"] == expected["content"]
    assert "logprobs" not in without.response_metadata


async def test_a_model_gives_them_with_each_answer() -> None:
    """As a field; a call's own keyword is stronger."""
    async with SpeculativeChatModel(target="builtin:target", max_tokens=3, logprobs=True, top_logprobs=1) as model:
        (first, *_) = (await model.ainvoke(CODE)).response_metadata["logprobs"]["content"]
        assert len(first["top_logprobs"]) == 1
        assert "logprobs" not in (await model.ainvoke(CODE, logprobs=False)).response_metadata
