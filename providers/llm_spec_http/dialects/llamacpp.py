"""llama-server of llama.cpp.

It continues a last assistant message and repeats it. It gives token ids beside logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from llm_spec.contract.endpoint import SampledToken
from llm_spec_http.dialects.base import Body, PostJson, ServerDialect, make_continuation

__all__ = ["LLAMACPP"]


class _LlamaCppTokenApi:
    """`/apply-template`, `/tokenize`, `/detokenize` and `/completion`.

    The token ids of a stream are in its logprobs.
    """

    @property
    def max_top(self) -> int:
        return 0  # `echo` is silently ignored

    def build_token_id_fields(self, *, chat: bool) -> Body:
        # Probabilities after sampling: for those before it, the server sorts its whole vocabulary,
        # which takes a millisecond a token.
        return {"post_sampling_probs": True, **({"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1})}

    def build_score_fields(self, top: int) -> Body:
        raise NotImplementedError

    async def encode(self, post_json: PostJson, text: str) -> list[int]:
        return list((await post_json("/tokenize", {"content": text, "parse_special": False}))["tokens"])

    async def decode(self, post_json: PostJson, token_ids: Sequence[int]) -> str:
        return str((await post_json("/detokenize", {"tokens": list(token_ids)}))["content"])

    async def encode_chat(self, post_json: PostJson, body: Body) -> tuple[list[int], int | None]:
        prompt = (await post_json("/apply-template", {"messages": body["messages"]}))["prompt"]
        answer = await post_json("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
        return list(answer["tokens"]), None

    async def sample_next(
        self, post_json: PostJson, prefixes: Sequence[Sequence[int]], sampling: Body
    ) -> list[SampledToken]:
        # Not OpenAI's endpoint: it gives no id for a token that ends inside a character.
        body: Body = {"prompt": [list(prefix) for prefix in prefixes], "n_predict": 1, **sampling}
        body |= {"return_tokens": True, "response_fields": ["index", "content", "tokens", "stop_type"]}
        answer = await post_json("/completion", body)
        answers = cast("list[Mapping[str, Any]]", answer if isinstance(answer, list) else [answer])
        return [_parse_sampled_token(entry) for entry in sorted(answers, key=lambda entry: int(entry["index"]))]

    def read_token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        delta = cast("Mapping[str, Any]", choice.get("delta") or {})
        logprobs = cast("Mapping[str, Any]", choice.get("logprobs") or {})
        entries: list[Mapping[str, Any]] = logprobs.get("content") or []
        is_ascii = str(choice.get("text") or delta.get("content") or "").isascii()
        is_whole = is_ascii or (entries and all(map(_has_whole_token_text, entries)))
        return tuple(int(entry["id"]) for entry in entries) if is_whole else None


def _has_whole_token_text(entry: Mapping[str, Any]) -> bool:
    """Return True if the text sent with a token's id is the text of this token alone.

    The server waits for whole characters, and then gives only the last token's id, with the bytes
    of all of them. It gives the token's own bytes only among the likeliest tokens.
    """
    likeliest = entry.get("top_probs") or entry.get("top_logprobs") or ()
    own = (likely["bytes"] for likely in likeliest if likely["id"] == entry["id"])
    return bool(next(own, None) == entry["bytes"])


def _parse_sampled_token(answer: Mapping[str, Any]) -> SampledToken:
    if not answer["tokens"]:
        raise ValueError("the answer has no id for the sampled token")
    is_end = answer["stop_type"] == "eos"
    return SampledToken(int(answer["tokens"][-1]), "" if is_end else str(answer["content"]), is_end)


LLAMACPP: Final = ServerDialect(
    name="llamacpp",
    summary="llama.cpp's llama-server",
    base_url="http://127.0.0.1:8080/v1",
    key_variable="LLAMA_API_KEY",
    continuation=make_continuation(),
    repeats_prefix=True,
    token_api=_LlamaCppTokenApi(),
    sampling_names={"repetition_penalty": "repeat_penalty"},  # it ignores the other name silently
    reuses_connections=False,  # it announces keep-alive, but closes after every streamed answer
    renders_templates=True,
)
