"""The times and costs of a hosted model: it reads, caches, takes predictions, judges drafts.

It knows one answer, like `SimulatedTarget`. Times are `asyncio.sleep`, tokens the pieces of
`split_into_pieces`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, NamedTuple

from llm_spec.contract.events import ChatResponse, Finish, StreamEvent, TextDelta, Usage
from llm_spec.contract.provider import Capabilities
from llm_spec.contract.request import ChatRequest
from llm_spec.contract.response import complete_from_stream
from llm_spec.measure.tokens import split_into_pieces
from llm_spec.strategies.judge_verdict import split_into_passages

__all__ = ["SimulatedHostedModel"]


class SimulatedHostedModel:
    """Writes `answer`, and judges correctly which passages of a draft it would have written.

    The first token takes `first_token_s`, and `read_token_s` for every token of the prompt that is
    not a beginning shared with an earlier prompt. Every other token takes `token_s`, or
    `predicted_token_s` if a prediction contained it.
    """

    def __init__(
        self,
        answer: str,
        *,
        first_token_s: float = 0.0,
        token_s: float = 0.0,
        read_token_s: float = 0.0,
        predicted_token_s: float | None = None,
    ) -> None:
        self.name = "hosted:target"
        self.capabilities = Capabilities(prediction=True)
        self._answer = answer
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._read_token_s = read_token_s
        self._predicted_token_s = token_s if predicted_token_s is None else predicted_token_s
        self._seen_prompts: list[list[str]] = []

    @asynccontextmanager
    async def stream(self, request: ChatRequest) -> AsyncGenerator[AsyncIterator[StreamEvent]]:
        async with aclosing(self._stream_reply(request)) as events:
            yield events

    async def complete(self, request: ChatRequest) -> ChatResponse:
        return await complete_from_stream(self, request)

    async def aclose(self) -> None:
        """Nothing to release."""

    # --------------------------------------------------------------------------------------- inside

    async def _stream_reply(self, request: ChatRequest) -> AsyncGenerator[StreamEvent]:
        prompt = [piece for message in request.messages for piece in split_into_pieces(message.text)]
        num_cached = max((_count_common_prefix_pieces(prompt, earlier) for earlier in self._seen_prompts), default=0)
        self._seen_prompts.append(prompt)
        pieces = split_into_pieces(self._choose_reply_text(request))
        predicted = _match_pieces_with_prediction(pieces, split_into_pieces(request.prediction or ""))
        clock = asyncio.get_running_loop().time
        at = clock() + self._first_token_s + self._read_token_s * (len(prompt) - num_cached)
        for index, piece in enumerate(pieces):
            if index:
                at += self._predicted_token_s if predicted[index] else self._token_s
            await asyncio.sleep(max(0.0, at - clock()))  # it keeps writing while its reader is busy
            yield TextDelta(piece)
        num_accepted = sum(predicted)
        num_rejected = len(split_into_pieces(request.prediction or "")) - num_accepted
        usage = Usage(
            input_tokens=len(prompt),
            cached_input_tokens=num_cached,
            output_tokens=len(pieces) + num_rejected,
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=num_rejected,
            cancelled_output_tokens=num_rejected,
        )
        yield Finish("stop", usage, "eos")

    def _choose_reply_text(self, request: ChatRequest) -> str:
        """Return a verdict, the rest of an interrupted answer, or the answer."""
        *before, last = request.messages
        question = _parse_judge_question(last.text)
        if question is not None:
            return self._write_verdict(question)
        answer_so_far = next((message.text for message in reversed(before) if message.role == "assistant"), "")
        return self._answer.removeprefix(answer_so_far) if self._answer.startswith(answer_so_far) else self._answer

    def _write_verdict(self, question: _JudgeQuestion) -> str:
        answer_so_far = question.answer
        for number, passage in enumerate(question.passages[: question.num_settled], 1):
            answer_so_far += question.replaced.get(str(number), passage)
        rest, num_accepted = self._answer.removeprefix(answer_so_far), question.num_settled
        for passage in question.passages[question.num_settled :]:
            if not rest.startswith(passage):
                break
            rest, num_accepted = rest.removeprefix(passage), num_accepted + 1
        replacement = next(iter(split_into_passages(rest)), None)
        return json.dumps({"nonce": question.nonce, "accepted": num_accepted, "then": replacement}, ensure_ascii=False)


class _JudgeQuestion(NamedTuple):
    answer: str
    passages: list[str]
    num_settled: int
    replaced: dict[str, str]
    nonce: str


def _parse_judge_question(text: str) -> _JudgeQuestion | None:
    """Parse a question that `judge` asks; return None for any other message."""

    def read_json_after_mark(mark: str, default: Any = None) -> Any:
        at = text.rfind(mark)
        return default if at < 0 else json.JSONDecoder().raw_decode(text, at + len(mark))[0]

    nonce = read_json_after_mark("The nonce is ")
    if nonce is None:
        return None
    return _JudgeQuestion(
        answer=read_json_after_mark("Your answer so far, as a JSON string: "),
        passages=read_json_after_mark("numbered from 1: "),
        num_settled=read_json_after_mark('"accepted" is a number from '),
        replaced=read_json_after_mark("by number: ", {}),
        nonce=nonce,
    )


def _count_common_prefix_pieces(prompt: Sequence[str], earlier: Sequence[str]) -> int:
    """Count the pieces that two prompts share at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, earlier, strict=False)))


def _match_pieces_with_prediction(pieces: Sequence[str], prediction: Sequence[str]) -> list[bool]:
    """Tell for each piece of an answer if a prediction contained it, in order."""
    is_predicted = [False] * len(pieces)
    for block in SequenceMatcher(None, pieces, prediction, autojunk=False).get_matching_blocks():
        is_predicted[block.a : block.a + block.size] = [True] * block.size
    return is_predicted
