"""The server inside a program, and OpenAI's own client asking it: a stream, and what the draft did for it.

Needs: pip install '.[onnx,openai,server]'
"""

import asyncio

try:
    from openai import AsyncOpenAI

    from llm_spec.server import Server, ServerConfig
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; run: pip install '.[onnx,openai,server]'") from error


async def main() -> None:
    # the built-in pair; `llm-spec serve` alone serves the same, on port 8700
    async with (
        Server(ServerConfig.builtin(port=0)) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none is asked for") as client,
    ):
        stream = await client.chat.completions.create(
            model="builtin",
            messages=[{"role": "user", "content": "def getregentry():"}],
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
                accepted = chunk.usage.completion_tokens_details.accepted_prediction_tokens
                print(f"\n{chunk.usage.completion_tokens} tokens, of which the draft wrote {accepted}")


asyncio.run(main())
