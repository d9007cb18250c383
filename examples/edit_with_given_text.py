"""Editing: the text being edited is the draft, and most of it is accepted.

Needs: pip install '.[onnx]'
"""

import asyncio

from llm_spec import ReferenceDraft, SpeculativeConfig, SpeculativeDecoder, open_provider


async def main() -> None:
    target = open_provider("builtin:target")
    prompt = "def getregentry():"
    before = (await SpeculativeDecoder(target=target, draft=None).decode(prompt, max_tokens=64)).content
    draft = ReferenceDraft(before.replace("StreamReader", "Reader", 1))  # the same but for one word
    decoder = SpeculativeDecoder(target=target, draft=draft, config=SpeculativeConfig(strategy="tokens"))
    result = await decoder.decode(prompt, max_tokens=64)
    assert result.content == before
    print(result.content)
    print(result.summary())


if __name__ == "__main__":
    asyncio.run(main())
