"""Only verified text is streamed; each round says what became of its draft.

Needs: pip install '.[onnx]'
"""

import asyncio

from llm_spec import Round, SpeculativeDecoder, SpeculativeFinish, TextDelta


async def main() -> None:
    async with (
        SpeculativeDecoder(target="builtin:target", draft="builtin:draft") as decoder,
        decoder.stream("def decode(self, input, final=False):", rounds=True, max_tokens=48) as events,
    ):
        async for event in events:
            match event:
                case TextDelta(text=text, origin=origin):
                    print(f"{origin:>10}  {text!r}")
                case Round():
                    print(f"     round  {event.num_accepted_tokens} of {event.num_draft_tokens} accepted")
                case SpeculativeFinish(result=result) if result is not None:
                    print(result.stats.summary())
                case _:
                    pass


if __name__ == "__main__":
    asyncio.run(main())
