"""An answer held to a JSON schema: valid at any temperature, and the same with and without speculation.

Needs: pip install '.[onnx,grammar]'
"""

import asyncio
import json

from llm_spec import SpeculativeDecoder

SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "pattern": "^test_[a-z_]{1,20}$"},
        "arguments": {"type": "array", "items": {"enum": ["self", "path", "mode"]}, "minItems": 1, "maxItems": 3},
        "line": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["function", "arguments", "line"],
    "additionalProperties": False,
}


async def main() -> None:
    prompt = "def test_open_path(self, path, mode):"
    wanted = {"type": "json_schema", "json_schema": {"name": "call", "schema": SCHEMA}}
    for temperature in (0.0, 1.0):
        texts: set[str] = set()
        for draft in ("builtin:draft", None):
            async with SpeculativeDecoder(target="builtin:target", draft=draft) as decoder:
                result = await decoder.decode(prompt, response_format=wanted, temperature=temperature, seed=3)
            texts.add(result.content)
            print(f"temperature {temperature}, {result.strategy}: {result.stats.summary()}")
        assert len(texts) == 1, texts
        answer = json.loads(texts.pop())
        assert answer["function"].startswith("test_")
        print(answer)
    print("valid, and one text each")


if __name__ == "__main__":
    asyncio.run(main())
