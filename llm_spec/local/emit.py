"""Token ids of a local model to events: text, reasoning, log-probabilities and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from llm_spec.contract.events import Origin, Round, StoppedBy, StreamEvent, TextDelta, TokenLogprob
from llm_spec.contract.token_model import MessageFormatTokenizer, TokenBytesTokenizer, Tokenizer
from llm_spec.contract.tools import ToolUse
from llm_spec.local.chosen_logprobs import ChosenLogprob
from llm_spec.local.detokenizing import IncrementalDecoder, StopMatcher, merge_neighbouring_deltas
from llm_spec.local.loop import TokenRound
from llm_spec.local.messages.parser import MessageParser

__all__ = [
    "AnswerEmitter",
    "TokenNames",
    "open_message_parser",
]


class TokenNames:
    """The texts and bytes of one tokenizer's tokens, cached for one answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Final = tokenizer
        self._names: dict[int, tuple[str, bytes]] = {}

    def make_token_logprob(self, chosen: ChosenLogprob) -> TokenLogprob:
        """Make the log-probability of an answer's token, with the likeliest tokens in its place."""
        top = tuple(self._make_named_logprob(token_id, logprob) for token_id, logprob in chosen.top)
        return self._make_named_logprob(chosen.token_id, chosen.logprob, top)

    def _make_named_logprob(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        if token_id not in self._names:
            self._names[token_id] = self._find_token_name(token_id)
        text, token_bytes = self._names[token_id]
        return TokenLogprob(text, logprob, token_bytes, top)

    def _find_token_name(self, token_id: int) -> tuple[str, bytes]:
        if isinstance(self._tokenizer, TokenBytesTokenizer):
            token_bytes = self._tokenizer.token_bytes(token_id)
            return token_bytes.decode(errors="replace"), token_bytes
        text = self._tokenizer.decode([token_id])
        return text, text.encode()


_NUM_TAIL_TOKENS = 16  # the last tokens of a prompt, in which a mark may open the reasoning
_ID_CHARACTERS = 24


class AnswerEmitter:
    """Turns one answer's tokens into events.

    It holds back stop strings, incomplete characters, and whatever `parser` holds back. With
    `has_logprobs`, rounds come with log-probabilities, which are emitted with the text of their
    tokens. Tokens without text (EOS) and tokens outside the answer's text are left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], parser: MessageParser | None, *, has_logprobs: bool = False
    ) -> None:
        self._eos_token_ids = tokenizer.eos_token_ids
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._parser = parser
        self._mark_tokens: Mapping[int, str] = {}
        if parser is not None and isinstance(tokenizer, MessageFormatTokenizer):
            self._mark_tokens = tokenizer.mark_tokens
        self._names = TokenNames(tokenizer) if has_logprobs else None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not come yet
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def stopped_by(self) -> StoppedBy | None:
        """The part of the text that ended the answer, or None."""
        if self._matcher.matched is not None:
            return "stop_string"
        return "tool_calls" if self._parser is not None and self._parser.is_over else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    @property
    def has_tool_calls(self) -> bool:
        """True if a tool was called."""
        return self._parser is not None and self._parser.num_calls > 0

    def emit_round(self, tokens: TokenRound) -> tuple[Round, list[StreamEvent]]:
        """Return the round's report and the events that may be shown.

        The report leaves out the tokens after the end of the answer.
        """
        events: list[StreamEvent] = []
        num_emitted = 0
        for token_id, origin in zip(tokens.token_ids, tokens.origins, strict=True):
            num_emitted += 1
            self.num_reasoning_tokens += self._parser is not None and self._parser.is_reasoning
            if token_id not in self._eos_token_ids:
                if self._names is not None:
                    self._logprobs.append(self._names.make_token_logprob(tokens.logprobs[num_emitted - 1]))
                events += self._decode_token(token_id, origin)
            if self.stopped_by is not None:
                break
        self.num_tokens += num_emitted
        report = tokens.report
        if num_emitted < report.num_emitted_tokens:
            num_accepted = min(report.num_accepted_tokens, num_emitted)
            report = replace(report, num_emitted_tokens=num_emitted, num_accepted_tokens=num_accepted)
        return report, merge_neighbouring_deltas(events)

    def flush(self, *, is_cut_off: bool = False) -> list[StreamEvent]:
        """Return the events held back at the end of the answer; `is_cut_off`: a limit ended it."""
        events = self._parse_tool_calls_and_reasoning(
            [*self._match_stop_strings(self._decoder.flush()), *self._matcher.flush()]
        )
        if self._parser is not None:
            events += self._parser.flush(is_cut_off=is_cut_off)
        return merge_neighbouring_deltas(events)

    def _decode_token(self, token_id: int, origin: Origin) -> list[StreamEvent]:
        mark = self._mark_tokens.get(token_id)
        if mark is None:
            return self._parse_tool_calls_and_reasoning(
                self._match_stop_strings(self._decoder.push(token_id), origin, self._decoder.num_held_tokens)
            )
        return self._parse_tool_calls_and_reasoning(
            [*self._match_stop_strings(self._decoder.flush(), origin, 1), *self._match_stop_strings(mark, origin)]
        )

    def _match_stop_strings(self, text: str, origin: Origin = "plain", num_tokens_held: int = 0) -> list[TextDelta]:
        """Return the text that the stop strings let through.

        `text` belongs to all tokens so far except the last `num_tokens_held`.
        """
        if self._names is None or not text:
            return self._matcher.push(text, origin)
        num_complete = len(self._logprobs) - num_tokens_held
        logprobs, self._logprobs = tuple(self._logprobs[:num_complete]), self._logprobs[num_complete:]
        return self._matcher.push(text, origin, None, logprobs)

    def _parse_tool_calls_and_reasoning(self, deltas: Sequence[TextDelta]) -> list[StreamEvent]:
        if self._parser is None:
            return [*deltas]
        return [event for delta in deltas for event in self._parser.push(delta)]


def open_message_parser(
    tokenizer: Tokenizer, tool_use: ToolUse, prompt_ids: Sequence[int], prefix: str = ""
) -> MessageParser | None:
    """Open the parser of an answer to this prompt, which ends with `prefix`.

    Returns None if the answer can only be text. The ids of calls are derived from the prompt: they
    are unique in a conversation, and the same request gives the same ids.
    """
    if not isinstance(tokenizer, MessageFormatTokenizer):
        return None
    reasoning, message_format = tokenizer.reasoning, tokenizer.message_format if tool_use.tools else None
    if reasoning is None and message_format is None:
        return None
    tail = _read_prompt_end(tokenizer, prompt_ids, prefix)
    id_characters = None if message_format is None else message_format.id_characters

    def make_call_id(index: int) -> str:
        digest = hashlib.sha256(b"".join(token_id.to_bytes(4, "little") for token_id in prompt_ids))
        digest.update(b"call %d" % index)
        return digest.hexdigest()[:id_characters] if id_characters else f"call_{digest.hexdigest()[:_ID_CHARACTERS]}"

    parser = MessageParser(
        message_format,
        tool_use.names,
        reasoning,
        is_reasoning=reasoning is not None and tail.rstrip().endswith(reasoning.open),
        make_call_id=make_call_id,
        max_calls=tool_use.max_calls,
    )
    if prefix:
        parser.push(TextDelta(prefix))  # its events are known already
    return parser


def _read_prompt_end(tokenizer: MessageFormatTokenizer, prompt_ids: Sequence[int], prefix: str) -> str:
    """Return the last text of a prompt, with its marks, without the prefix that follows it.

    Prompt and prefix are encoded as one text, so a token may belong to both.
    """
    num_tokens = _NUM_TAIL_TOKENS + len(prefix.encode(errors="replace"))
    text, run = "", list[int]()
    for token_id in prompt_ids[-num_tokens:]:
        mark = tokenizer.mark_tokens.get(token_id)
        if mark is None:
            run.append(token_id)
        else:
            text, run = text + tokenizer.decode(run) + mark, []
    text += tokenizer.decode(run)
    return text.removesuffix(prefix if text.endswith(prefix) else tokenizer.decode(tokenizer.encode(prefix)))
