"""Answers that only the target's own chunks tell (several choices, log-probabilities): passed on, or merged. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from llm_spec.chat import Usage
from llm_spec.openai_chat import parse_usage
from llm_spec.server.request_fields import Json

__all__ = ["ChunkMerger", "rewrite_chunk_for_client"]


def rewrite_chunk_for_client(
    chunk: Mapping[str, Any], *, answer_id: str, model: str, include_usage: bool
) -> Json | None:
    """A chunk under this server's names; None for one that holds only a usage that was not requested."""
    rewritten = {**chunk, "id": answer_id, "model": model}
    rewritten["choices"] = [_fill_logprob_lists(choice) for choice in cast("list[Json]", chunk.get("choices") or [])]
    if not include_usage:
        rewritten.pop("usage", None)
        if not rewritten.get("choices"):
            return None
    return rewritten


class ChunkMerger:
    """Puts the chunks of one answer together."""

    def __init__(self) -> None:
        self._choices: dict[int, Json] = {}
        self._usage: Any = None
        self._tier: Json = {}
        self.usage: Usage | None = None

    def add_chunk(self, chunk: Mapping[str, Any]) -> None:
        """One more chunk."""
        self.usage = parse_usage(chunk) or self.usage
        self._usage = chunk.get("usage") or self._usage
        self._tier |= {"service_tier": chunk["service_tier"]} if chunk.get("service_tier") else {}
        for position, choice in enumerate(cast("list[Json]", chunk.get("choices") or [])):
            index = position if choice.get("index") is None else int(choice["index"])
            merged = self._choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
            merged["finish_reason"] = choice.get("finish_reason") or merged["finish_reason"]
            merged["logprobs"] = _append_logprob_lists(merged["logprobs"], _fill_logprob_lists(choice).get("logprobs"))
            if "text" in choice:
                merged["text"] = merged.get("text", "") + choice["text"]
            elif choice.get("delta") is not None:
                message = merged.setdefault("message", {"role": "assistant", "content": None, "refusal": None})
                _append_delta_to_message(message, choice["delta"])

    def build_response_body(self, *, answer_id: str, model: str, kind: str) -> Json:
        """The answer."""
        usage = {} if self._usage is None else {"usage": self._usage}
        choices = [choice for _, choice in sorted(self._choices.items())]
        return {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            **usage,
            **self._tier,
        }


def _fill_logprob_lists(choice: Json) -> Json:
    """A chunk's choice of chat, in whose log-probabilities some servers leave out what is null."""
    if "delta" not in choice or not choice.get("logprobs"):
        return choice
    return {**choice, "logprobs": {"content": None, "refusal": None, **choice["logprobs"]}}


def _append_delta_to_message(message: Json, delta: Json) -> None:
    for name in ("content", "refusal", "reasoning_content", "reasoning"):
        if isinstance(delta.get(name), str):
            message[name] = (message.get(name) or "") + delta[name]
    for position, piece in enumerate(cast("list[Json]", delta.get("tool_calls") or [])):
        calls = cast("list[Json]", message.setdefault("tool_calls", []))
        index = position if piece.get("index") is None else int(piece["index"])
        if index > len(calls):
            continue  # a call that was never begun
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        function = cast("Json", piece.get("function") or {})
        calls[index]["id"] = calls[index]["id"] or piece.get("id") or ""
        calls[index]["function"]["name"] += function.get("name") or ""
        calls[index]["function"]["arguments"] += function.get("arguments") or ""


def _append_logprob_lists(logprobs: Json | None, more: Json | None) -> Json | None:
    """Log-probabilities with those of one more piece: lists grow."""
    if logprobs is None or more is None:
        return more if logprobs is None else logprobs
    return {
        name: [*(logprobs.get(name) or []), *value] if isinstance(value, list) else value
        for name, value in more.items()
    }
