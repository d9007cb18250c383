"""The built-in pair: the same text as the target alone, and how long each took.

Needs: pip install '.[onnx]'
"""

import asyncio

from llm_spec import SpeculativeDecoder


async def main() -> None:
    prompt = "def getregentry():"
    async with SpeculativeDecoder(target="builtin:target", draft="lookup+builtin:draft") as decoder:
        result = await decoder.decode(prompt, max_tokens=96)
    async with SpeculativeDecoder(target="builtin:target", draft=None) as plain:
        alone = await plain.decode(prompt, max_tokens=96)
    print(result.content)
    print(result.summary())
    print(f"the target alone: {alone.timings.total_s:.3f} s; the same text: {alone.content == result.content}")


if __name__ == "__main__":
    asyncio.run(main())
