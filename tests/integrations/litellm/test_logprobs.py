"""Log-probabilities in litellm's own responses: those of the decoder, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("litellm")

import litellm

from llm_spec import SpeculativeDecoder
from llm_spec.integrations.litellm import register
from llm_spec.kit.openai_logprobs import convert_logprobs_to_openai

pytestmark = pytest.mark.filterwarnings("ignore")  # of litellm's own models

CODE = "def test_spawnl(self):"


def describe(content: list[Any]) -> list[dict[str, Any]]:
    """litellm's entries, in the order of fields in which this library tells them."""
    names = ("token", "logprob", "bytes")
    return [
        {name: entry[name] for name in names}
        | {"top_logprobs": [{name: likely[name] for name in names} for likely in entry["top_logprobs"]]}
        for entry in (item.model_dump() for item in content)
    ]


@pytest.mark.parametrize("top_logprobs", [None, 2])
async def test_choices_have_them(top_logprobs: int | None) -> None:
    async with SpeculativeDecoder(target="builtin:target", draft=None) as decoder:
        plain = await decoder.decode(CODE, max_tokens=12, top_logprobs=top_logprobs or 0)
    expected = convert_logprobs_to_openai(plain.logprobs)
    options: dict[str, Any] = {
        "model": "probable/fast",
        "messages": [{"role": "user", "content": CODE}],
        "max_tokens": 12,
        "logprobs": True,
        **({} if top_logprobs is None else {"top_logprobs": top_logprobs}),
    }
    async with register("probable", model="fast", target="builtin:target", draft="lookup+builtin:draft"):
        whole = await litellm.acompletion(**options)
        text, streamed, reasons = "", [], []
        async for chunk in await litellm.acompletion(**options, stream=True):
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            streamed += [] if getattr(choice, "logprobs", None) is None else choice.logprobs.content
    assert text == whole.choices[0].message.content == plain.content
    assert reasons[-1] == "length"
    assert len(expected) == 12
    assert describe(whole.choices[0].logprobs.content) == expected
    assert describe(streamed) == expected
