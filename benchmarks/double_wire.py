"""What vLLM's completions look like: requests read from JSON, answers written to it. Pure.

The fields are those of `/v1/chat/completions`, `/v1/completions` and `/tokenize`; what a real server would heed and
this one does not is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

from double_model import (
    END_ID,
    LEAST_LOGPROB,
    Candidate,
    Context,
    Model,
    Sampling,
    decode,
    encode,
    encode_chat,
)

MODEL_NAME: Final = "double"
MAX_MODEL_LEN: Final = 16384
MAX_LOGPROBS: Final = 20
_UNSUPPORTED: Final = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "tools", "response_format", "structured_outputs"),
    *("best_of", "suffix", "min_tokens", "ignore_eos", "stop_token_ids"),
)


class InvalidRequestError(ValueError):
    """Answered with 400."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What a request says beside its prompt."""

    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    has_token_ids: bool
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo: bool = False
    names_are_ids: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, is_chat: bool, takes_ids: bool) -> CompletionOptions:
        """Read a body; raises InvalidRequestError for what the double does not do."""
        unsupported = [name for name in _UNSUPPORTED if body.get(name)]
        if unsupported or body.get("n", 1) != 1 or (is_chat and body.get("logprobs")):
            raise InvalidRequestError(f"this server does not do {', '.join(unsupported) or 'n > 1, or chat logprobs'}")
        echo, num_logprobs = bool(body.get("echo")), None if is_chat else body.get("logprobs")
        num_prompt_logprobs = body.get("prompt_logprobs", num_logprobs if echo else None)
        if max(num_logprobs or 0, num_prompt_logprobs or 0) > MAX_LOGPROBS:
            raise InvalidRequestError(f"Requested logprobs greater than max allowed: {MAX_LOGPROBS}")
        is_streamed, stop = bool(body.get("stream")), body.get("stop") or ()
        stream_options: Mapping[str, Any] = body.get("stream_options") or {}
        if is_streamed and num_prompt_logprobs is not None:
            raise InvalidRequestError("`prompt_logprobs` are not available when `stream=True`.")
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        return cls(
            max_tokens=(MAX_MODEL_LEN // 2 if is_chat else 16) if limit is None else int(limit),
            sampling=_parse_sampling(body),
            seed=body.get("seed"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            is_streamed=is_streamed,
            has_usage=bool(stream_options.get("include_usage")),
            has_token_ids=takes_ids and bool(body.get("return_token_ids")),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            echo=echo,
            names_are_ids=bool(body.get("return_tokens_as_token_ids")),
        )


def _parse_sampling(body: Mapping[str, Any]) -> Sampling:
    given = {f.name: body[f.name] for f in fields(Sampling) if body.get(f.name) is not None}
    biases: Mapping[str, float] = given.pop("logit_bias", {})
    return Sampling(**given, logit_bias={int(token_id): bias for token_id, bias in biases.items()})


def parse_prompts(prompt: Any, *, takes_ids: bool) -> list[list[int]]:
    """The prompts of a completion: a text, ids, or several of either."""
    several: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else list(prompt or ())
    if not several:
        raise InvalidRequestError("prompt is empty")
    if not takes_ids and not all(isinstance(one, str) for one in several):
        raise InvalidRequestError("this server takes text, not token ids")
    return [encode(one) if isinstance(one, str) else one for one in several]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(cast("list[Any]", prompt)) and isinstance(prompt[0], int)


def parse_chat(body: Mapping[str, Any]) -> list[int]:
    """The ids of a chat's prompt, with vLLM's two fields that make it go on with the last message."""
    continues, opens = bool(body.get("continue_final_message")), bool(body.get("add_generation_prompt", True))
    if continues and opens:
        raise InvalidRequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return encode_chat(body.get("messages") or (), continues=continues)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a row; `stop_reason` is the stop string that ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class Row:
    """One prompt and what is written after it."""

    index: int
    prompt_ids: list[int]
    options: CompletionOptions
    next_ids: Iterator[int]
    written_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    num_shown: int = 0  # characters
    pieces: list[Piece] = field(default_factory=list[Piece])

    @property
    def is_finished(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].finish_reason is not None

    def step(self) -> Piece:
        """Write one token."""
        token_id = next(self.next_ids)
        self.written_ids.append(token_id)
        self.text += "" if token_id == END_ID else decode((token_id,))
        piece = self._show((token_id,), *self._find_end())
        self.pieces.append(piece)
        return piece

    def _find_end(self) -> tuple[str | None, str | None]:
        found = [(at, stop) for stop in self.options.stop if (at := self.text.find(stop, 0)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[:at]
            return "stop", stop
        if self.written_ids[-1] == END_ID:
            return "stop", None
        return ("length" if len(self.written_ids) >= self.options.max_tokens else None), None

    def _show(self, token_ids: tuple[int, ...], finish_reason: str | None, stop_reason: str | None) -> Piece:
        """What may be shown: the beginning of what may become a stop string is held back."""
        held = 0 if finish_reason else max(map(len, self.options.stop), default=1) - 1
        end = max(self.num_shown, len(self.text) - held)
        text, self.num_shown = self.text[self.num_shown : end], end
        return Piece(text, token_ids, finish_reason, stop_reason)


class AnswerFormat:
    """What chat and text completions have in common."""

    kind = ""
    chunk_kind = ""

    def __init__(self, answer_id: str) -> None:
        self._head = {"id": answer_id, "created": int(time.time()), "model": MODEL_NAME}

    def make_opening(self, rows: Sequence[Row], options: CompletionOptions) -> list[dict[str, Any]]:
        """What comes before the first token."""
        return []

    def make_chunk(self, row: Row, piece: Piece, options: CompletionOptions) -> dict[str, Any]:
        raise NotImplementedError

    def make_whole(self, rows: Sequence[Row], options: CompletionOptions, num_cached: int) -> dict[str, Any]:
        raise NotImplementedError

    def make_usage(self, rows: Sequence[Row], num_cached: int) -> dict[str, Any]:
        """The last chunk of a stream."""
        return {**self._wrap([], is_chunk=True), "usage": _count_usage(rows, num_cached)}

    def _wrap(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = self.chunk_kind if is_chunk else self.kind
        return {**self._head, "object": kind, "choices": choices}


def _count_usage(rows: Sequence[Row], num_cached: int) -> dict[str, Any]:
    num_prompt, num_written = sum(len(row.prompt_ids) for row in rows), sum(len(row.written_ids) for row in rows)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def make_opening(self, rows: Sequence[Row], options: CompletionOptions) -> list[dict[str, Any]]:
        (row,) = rows
        delta = {"role": "assistant", "content": ""}
        chunk = self._wrap([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], is_chunk=True)
        return [chunk | ({"prompt_token_ids": row.prompt_ids} if options.has_token_ids else {})]

    def make_chunk(self, row: Row, piece: Piece, options: CompletionOptions) -> dict[str, Any]:
        choice = {"index": row.index, "delta": {"content": piece.text}, "logprobs": None}
        return self._wrap([choice | _make_ending(piece, options)], is_chunk=True)

    def make_whole(self, rows: Sequence[Row], options: CompletionOptions, num_cached: int) -> dict[str, Any]:
        (row,) = rows
        message: dict[str, Any] = {"role": "assistant", "content": row.text, "reasoning": None, "tool_calls": []}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, **_make_whole_ending(row, options)}
        prompt_ids = row.prompt_ids if options.has_token_ids else None
        answer = self._wrap([choice], is_chunk=False)
        return answer | {"usage": _count_usage(rows, num_cached), "prompt_token_ids": prompt_ids}


class TextFormat(AnswerFormat):
    """`/v1/completions`."""

    kind = "text_completion"
    chunk_kind = kind

    def __init__(self, answer_id: str, model: Model) -> None:
        super().__init__(answer_id)
        self._model = model

    def make_chunk(self, row: Row, piece: Piece, options: CompletionOptions) -> dict[str, Any]:
        opening = decode(row.prompt_ids) if options.echo and len(row.written_ids) == 1 else ""
        choice = {"index": row.index, "text": opening + piece.text, "logprobs": None, **_make_ending(piece, options)}
        return self._wrap([choice], is_chunk=True)

    def make_whole(self, rows: Sequence[Row], options: CompletionOptions, num_cached: int) -> dict[str, Any]:
        choices = [self._make_choice(row, options) for row in rows]
        return self._wrap(choices, is_chunk=False) | {"usage": _count_usage(rows, num_cached)}

    def _make_choice(self, row: Row, options: CompletionOptions) -> dict[str, Any]:
        echoed_ids = row.prompt_ids if options.echo else []
        choice: dict[str, Any] = {
            "index": row.index,
            "text": decode(echoed_ids) + row.text,
            "logprobs": None,
            **_make_whole_ending(row, options),
            "prompt_token_ids": row.prompt_ids if options.has_token_ids else None,
            "prompt_logprobs": None,
        }
        if options.num_prompt_logprobs is None and options.num_logprobs is None:
            return choice
        all_ids = [*row.prompt_ids, *row.written_ids]
        candidates = [None, *_score(self._model.read(all_ids[:1]), all_ids[1:])]
        if options.num_prompt_logprobs is not None:
            given = list(zip(row.prompt_ids, candidates, strict=False))
            choice["prompt_logprobs"] = [_make_entry(i, c, options.num_prompt_logprobs) for i, c in given]
        if options.num_logprobs is not None:
            start = 0 if options.echo else len(row.prompt_ids)
            choice["logprobs"] = _make_logprobs(all_ids[start:], candidates[start:], options)
        return choice


def _make_ending(piece: Piece, options: CompletionOptions) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": piece.finish_reason}
    if piece.finish_reason:
        ending["stop_reason"] = piece.stop_reason
    if options.has_token_ids:
        ending["token_ids"] = piece.token_ids
    return ending


def _make_whole_ending(row: Row, options: CompletionOptions) -> dict[str, Any]:
    last = row.pieces[-1] if row.pieces else Piece("", (), "length")
    return {
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": row.written_ids if options.has_token_ids else None,
    }


def _score(context: Context, token_ids: Sequence[int]) -> Iterator[list[Candidate]]:
    """What could have come in the place of each token."""
    for token_id in token_ids:
        yield context.list_candidates()
        context.push(token_id)


def _find_logprob(token_id: int, candidates: Sequence[Candidate]) -> float:
    return next((c.logprob for c in candidates if c.token_id == token_id), LEAST_LOGPROB)


def _make_entry(token_id: int, candidates: Sequence[Candidate] | None, num_top: int) -> dict[str, Any] | None:
    """A position of `prompt_logprobs`: the likeliest, and the token that was given."""
    if candidates is None:
        return None
    ranks = {c.token_id: n for n, c in enumerate(candidates, 1)}
    shown = [*candidates[:num_top]]
    if token_id not in {c.token_id for c in shown}:
        shown.append(Candidate(token_id, _find_logprob(token_id, candidates)))
    return {
        str(c.token_id): {
            "logprob": c.logprob,
            "rank": ranks.get(c.token_id, len(ranks) + 1),
            "decoded_token": decode((c.token_id,)),
        }
        for c in shown
    }


def _make_logprobs(
    token_ids: Sequence[int], candidates: Sequence[Sequence[Candidate] | None], options: CompletionOptions
) -> dict[str, Any]:
    """`logprobs` of a text completion; the first token of a prompt has none."""

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if options.names_are_ids else decode((token_id,))

    logprobs: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    offset = 0
    for token_id, possible in zip(token_ids, candidates, strict=True):
        logprobs["text_offset"].append(offset)
        logprobs["tokens"].append(name(token_id))
        logprobs["token_logprobs"].append(None if possible is None else _find_logprob(token_id, possible))
        entry = None if possible is None else _make_entry(token_id, possible, options.num_logprobs or 0)
        top = None if entry is None else {name(int(key)): value["logprob"] for key, value in entry.items()}
        logprobs["top_logprobs"].append(top)
        offset += len(decode((token_id,)))
    return logprobs
