"""llama-server of llama.cpp: continues a last message of the assistant and repeats it; tells ids beside logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from llm_spec_http.dialects.base import Body, Call, Dialect, assistant_message

__all__ = ["LLAMACPP"]


class _LlamaTokens:
    """`/apply-template`, `/tokenize`, `/detokenize`; ids are in the entries of logprobs."""

    @property
    def max_top(self) -> int:
        return 0  # `echo` is silently ignored

    def id_fields(self, *, chat: bool) -> Body:
        return {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}

    def score_fields(self, top: int) -> Body:
        raise NotImplementedError

    async def encode(self, call: Call, text: str) -> list[int]:
        return list((await call("/tokenize", {"content": text, "parse_special": False}))["tokens"])

    async def decode(self, call: Call, token_ids: Sequence[int]) -> str:
        return str((await call("/detokenize", {"tokens": list(token_ids)}))["content"])

    async def encode_chat(self, call: Call, body: Body) -> tuple[list[int], int | None]:
        prompt = (await call("/apply-template", {"messages": body["messages"]}))["prompt"]
        answer = await call("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
        return list(answer["tokens"]), None

    def token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        delta = cast("Mapping[str, Any]", choice.get("delta") or {})
        if not str(choice.get("text") or delta.get("content") or "").isascii():
            return None  # it waits for whole characters, and then tells the last token alone
        logprobs = cast("Mapping[str, Any]", choice.get("logprobs") or {})
        return tuple(int(entry["id"]) for entry in logprobs.get("content") or ())


LLAMACPP: Final = Dialect(
    name="llamacpp",
    summary="llama.cpp's llama-server",
    base_url="http://127.0.0.1:8080/v1",
    key_variable="LLAMA_API_KEY",
    continuation=assistant_message(),
    repeats_prefix=True,
    token_api=_LlamaTokens(),
    sampling_names={"repetition_penalty": "repeat_penalty"},  # it ignores the other name silently
    keeps_alive=False,  # it announces keep-alive and closes the connection behind every streamed answer
)
