"""vLLM: continues the final message and works on token ids.

Without both marks for continuing, it answers 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from llm_spec.contract.endpoint import DecodingConstraint, SampledToken
from llm_spec.contract.events import FinishReason
from llm_spec.kit.openai_chat import parse_finish_reason
from llm_spec_http.dialects.base import Body, PostJson, ServerDialect, make_continuation, read_choices_in_order

__all__ = ["VLLM"]


class _VllmTokenApi:
    """`/tokenize`, `/detokenize`, and token ids with every generated answer."""

    @property
    def max_top(self) -> int:
        return 20  # what the server allows unless it was started with --max-logprobs

    def build_token_id_fields(self, *, chat: bool) -> Body:  # noqa: ARG002 - the same for both
        return {"return_token_ids": True}

    def build_score_fields(self, top: int) -> Body:
        return {"prompt_logprobs": top, "logprobs": top, "return_tokens_as_token_ids": True}

    async def encode(self, post_json: PostJson, text: str) -> list[int]:
        return list((await post_json("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"])

    async def decode(self, post_json: PostJson, token_ids: Sequence[int]) -> str:
        return str((await post_json("/detokenize", {"tokens": list(token_ids)}))["prompt"])

    async def encode_chat(self, post_json: PostJson, body: Body) -> tuple[list[int], int | None]:
        fields = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        answer = await post_json("/tokenize", {name: body[name] for name in fields if name in body})
        return list(answer["tokens"]), answer.get("max_model_len")

    async def sample_next(
        self, post_json: PostJson, prefixes: Sequence[Sequence[int]], sampling: Body
    ) -> list[SampledToken]:
        body: Body = {"prompt": [list(prefix) for prefix in prefixes], "max_tokens": 1, **sampling}
        choices = read_choices_in_order(
            await post_json("completions", {**body, **self.build_token_id_fields(chat=False)})
        )
        return [_parse_sampled_token(choice) for choice in choices]

    def read_token_ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        ids = choice.get("token_ids")
        return None if ids is None else tuple(ids)


class _VllmMessageApi:
    """`/render`, `/derender` and `/generate` of a server started with `--enable-scale-out`."""

    async def parse(
        self,
        post_json: PostJson,
        body: Body,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        *,
        num_read: int = 0,
    ) -> Mapping[str, Any]:
        read_ids = list(token_ids[:num_read])
        choice = {"index": 0, "token_ids": list(token_ids[num_read:]), "finish_reason": finish_reason}
        answer = await post_json(
            "chat/completions/derender",
            {
                "stream": True,  # only the stream parser accepts a part of an answer
                "generate_chunk": {"choices": [choice]},
                "stream_state": {"output_token_ids": read_ids, "output_chunk_lens": [1] * num_read},
                "prompt_token_ids": list(prompt_ids),
                "chat_request": body,
            },
        )
        (parsed,) = answer["chunk"]["choices"]
        return cast("Mapping[str, Any]", parsed)

    async def parse_whole(
        self,
        post_json: PostJson,
        body: Body,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: FinishReason,
    ) -> Mapping[str, Any]:
        choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": finish_reason}
        answer = await post_json(
            "chat/completions/derender",
            {
                "generate_response": {"request_id": "whole", "choices": [choice]},
                "prompt_tokens": len(prompt_ids),
                "prompt_token_ids": list(prompt_ids),
                "chat_request": body,
            },
        )
        (parsed,) = answer["choices"]
        return {"delta": parsed["message"], "finish_reason": parsed["finish_reason"]}

    async def render(self, post_json: PostJson, body: Body) -> tuple[list[int], DecodingConstraint | None]:
        answer: Body = await post_json("chat/completions/render", body)
        outputs = answer["sampling_params"].get("structured_outputs")
        if not outputs:
            return list(answer["token_ids"]), None
        is_reasoning_free = answer.get("reasoning_ended") is False
        return list(answer["token_ids"]), DecodingConstraint(_find_triggers(outputs), is_reasoning_free, answer)

    def build_constrained_stream(
        self,
        constraint: DecodingConstraint,
        prompt_ids: Sequence[int],
        written_ids: Sequence[int],
        *,
        max_tokens: int | None,
        seed: int | None,
    ) -> tuple[str, Body]:
        generation = constraint.generation
        sampling: Body = {**generation["sampling_params"]}
        num_left = sampling["max_tokens"] - len(written_ids)
        sampling["max_tokens"] = num_left if max_tokens is None else min(num_left, max_tokens)
        if seed is not None:
            sampling["seed"] = seed
        return "/inference/v1/generate", {
            **{name: value for name, value in generation.items() if name != "request_id"},
            "token_ids": [*prompt_ids, *written_ids],
            "sampling_params": sampling,
            # If reasoning did not end in the prompt, the server looks for its end in all ids.
            "reasoning_ended": generation.get("reasoning_ended") or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "output_mode": "text",
        }


def _find_triggers(outputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that start a constrained part; () if the text before them is not free.

    This reads xgrammar's structural tags of the form `triggered_tags`
    (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
    """
    tag: Body = json.loads(outputs.get("structural_tag") or "{}")
    form: Body = tag.get("format") or {}
    others = {name for name, value in form.items() if value} - {"type", "triggers", "tags", "stop_after_first"}
    return tuple(form["triggers"]) if form.get("type") == "triggered_tags" and not others else ()


def _parse_sampled_token(choice: Mapping[str, Any]) -> SampledToken:
    if not choice.get("token_ids"):
        raise ValueError("the answer has no id for the sampled token")
    is_end = parse_finish_reason(choice) == "stop"
    return SampledToken(int(choice["token_ids"][-1]), "" if is_end else str(choice.get("text") or ""), is_end)


VLLM: Final = ServerDialect(
    name="vllm",
    summary="vLLM",
    base_url="http://127.0.0.1:8000/v1",
    key_variable="VLLM_API_KEY",
    continuation=make_continuation(fields={"continue_final_message": True, "add_generation_prompt": False}),
    token_api=_VllmTokenApi(),
    message_api=_VllmMessageApi(),
    shares_prompt_cache=True,
    stops_when_reader_leaves=True,
    reasoning_fields=("reasoning_content", "reasoning"),  # the second since 0.12
    renders_templates=True,
)
