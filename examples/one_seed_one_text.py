"""Sampling: one seed gives one text, whichever draft and lookahead, or none at all.

Needs: pip install '.[onnx]'
"""

import asyncio

from llm_spec import Fixed, PromptLookup, SpeculativeConfig, SpeculativeDecoder, open_draft, open_provider

PROMPT = "def decode(self, input, final=False):"


async def main() -> None:
    target = open_provider("builtin:target")
    drafts = {"none": None, "model": open_draft("builtin:draft"), "lookup": PromptLookup()}
    texts: set[str] = set()
    for name, draft in drafts.items():
        for lookahead in (1, 3, 8):
            decoder = SpeculativeDecoder(
                target=target, draft=draft, config=SpeculativeConfig(lookahead=Fixed(lookahead))
            )
            result = await decoder.decode(
                "def decode(self, input, final=False):", max_tokens=64, temperature=0.7, seed=3
            )
            texts.add(result.content)
            print(f"draft {name:<7} lookahead {lookahead}: {result.stats.summary()}")
    assert len(texts) == 1, texts
    print("\nnine runs, one text:\n" + texts.pop())


if __name__ == "__main__":
    asyncio.run(main())
