"""Passes on or merges the target's own chunks, for choices and log-probabilities. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, cast

from llm_spec.contract.events import Usage
from llm_spec.kit.answer_parts import merge_detail, parse_usage
from llm_spec.kit.json import MAX_INT
from llm_spec.kit.openai_chat import DETAIL_FIELDS
from llm_spec.server.apis.fields import Json

__all__ = ["ChunkMerger", "rewrite_chunk_for_client"]

_MERGED_FIELDS: Final = frozenset({"index", "delta", "text", "logprobs", "finish_reason"})
_DETAIL_FIELDS: Final = (
    "content",
    "refusal",
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "function_call",
    *DETAIL_FIELDS,
)


def rewrite_chunk_for_client(
    chunk: Mapping[str, Any], *, answer_id: str, model: str, include_usage: bool, kind: str = "chat.completion.chunk"
) -> Json | None:
    """Rename a chunk; return None if it holds only a usage that was not requested."""
    created = chunk.get("created")
    rewritten = {
        **chunk,
        "id": answer_id,
        "object": kind,
        "created": created if type(created) is int and 0 <= created <= MAX_INT else int(time.time()),
        "model": model,
    }
    rewritten["choices"] = [_fill_logprob_lists(choice) for choice in cast("list[Json]", chunk.get("choices") or [])]
    if not include_usage:
        rewritten.pop("usage", None)
        if not rewritten.get("choices"):
            return None
    return rewritten


class ChunkMerger:
    """Merges the chunks of one answer, which are in the API's form (`ChunkNormalizer`)."""

    def __init__(self) -> None:
        self._choices: dict[int, Json] = {}
        # Choices with log-probabilities that cannot be read; the others would be incomplete
        self._lost_logprobs: set[int] = set()
        self._usage: Any = None
        self._tier: Json = {}
        self.usage: Usage | None = None

    def add_chunk(self, chunk: Mapping[str, Any]) -> None:
        """Merge one more chunk."""
        if chunk.get("usage"):
            self.usage = parse_usage(chunk)
            self._usage = None if self.usage is None else chunk["usage"]
        self._tier |= {"service_tier": tier} if isinstance(tier := chunk.get("service_tier"), str) and tier else {}
        for position, choice in enumerate(cast("list[Json]", chunk.get("choices") or [])):
            index = position if choice.get("index") is None else int(choice["index"])
            merged = self._choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
            merged |= {name: of for name, of in choice.items() if name not in _MERGED_FIELDS and of is not None}
            merged["finish_reason"] = choice.get("finish_reason") or merged["finish_reason"]
            if choice.get("logprobs") == {}:
                self._lost_logprobs.add(index)
            merged["logprobs"] = _append_logprob_lists(merged["logprobs"], _fill_logprob_lists(choice).get("logprobs"))
            if "text" in choice:
                merged["text"] = merged.get("text", "") + choice["text"]
            elif choice.get("delta") is not None:
                message = merged.setdefault("message", {"role": "assistant", "content": None, "refusal": None})
                _append_delta_to_message(message, choice["delta"])

    def end_open_choices(self) -> Json | None:
        """End the choices that the target has left open; return the chunk that ends them, or None.

        Such an answer ended well all the same (`[DONE]`).
        """
        ends: list[Json] = []
        for index, merged in sorted(self._choices.items()):
            if merged["finish_reason"] is None:
                has_calls = "tool_calls" in merged.get("message", {})
                merged["finish_reason"] = "tool_calls" if has_calls else "stop"
                rest: Json = {"text": ""} if "text" in merged else {"delta": {}}
                ends.append({"index": index, **rest, "finish_reason": merged["finish_reason"]})
        return {"choices": ends} if ends else None

    def build_response_body(self, *, answer_id: str, model: str, kind: str) -> Json:
        """Build the body of the whole answer."""
        usage = {} if self._usage is None else {"usage": self._usage}
        choices = [
            {**choice, "logprobs": None} if index in self._lost_logprobs else choice
            for index, choice in sorted(self._choices.items())
        ]
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
    """Add to a chat choice the null lists of log-probabilities that some servers leave out."""
    if "logprobs" not in choice or ("delta" not in choice and choice["logprobs"]):
        return choice
    logprobs = choice["logprobs"]
    return {**choice, "logprobs": {"content": None, "refusal": None, **logprobs} if logprobs else None}


def _append_delta_to_message(message: Json, delta: Json) -> None:
    merge_detail(message, {name: delta[name] for name in _DETAIL_FIELDS if delta.get(name) is not None})
    for position, piece in enumerate(cast("list[Json]", delta.get("tool_calls") or [])):
        calls = cast("list[Json]", message.setdefault("tool_calls", []))
        index = position if piece.get("index") is None else int(piece["index"])
        kind, text_field = ("custom", "input") if "custom" in piece else ("function", "arguments")
        if index > len(calls):
            continue  # a call that was never begun
        if index == len(calls):
            calls.append({"id": "", "type": kind, kind: {"name": "", text_field: ""}})
        call, more = calls[index], cast("Json", piece.get(kind) or {})
        call["id"] = call["id"] or piece.get("id") or ""
        call[kind]["name"] = call[kind]["name"] or more.get("name") or ""
        call[kind][text_field] += more.get(text_field) or ""


def _append_logprob_lists(logprobs: Json | None, more: Json | None) -> Json | None:
    """Append the log-probabilities of one more piece."""
    if logprobs is None or more is None:
        return more if logprobs is None else logprobs
    merged: Json = {**more, **logprobs}
    for name in more:
        if isinstance(more[name], list):
            merged[name] = [*(logprobs.get(name) or []), *more[name]]
    return merged
