"""What a model in this process has written, as events: token ids in; text, reasoning, log-probabilities, calls out."""

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
    """What the tokens of one tokenizer are called; one answer's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Final = tokenizer
        self._names: dict[int, tuple[str, bytes]] = {}

    def make_token_logprob(self, chosen: ChosenLogprob) -> TokenLogprob:
        """The log-probability of an answer's token, with those of the likeliest in its place."""
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


_NUM_TAIL_TOKENS = 16  # of a prompt, among which the mark stands that opens its reasoning
_ID_CHARACTERS = 24


class AnswerEmitter:
    """One answer's state: stop strings and incomplete characters are held back, and what `parser` holds back.

    `has_logprobs`: rounds come with log-probabilities, which are emitted with the text of their tokens. Those of
    tokens without text (EOS), and of tokens that are not text of the answer, are left out.
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
        """What in the text ended the answer; None: nothing did."""
        if self._matcher.matched is not None:
            return "stop_string"
        return "tool_calls" if self._parser is not None and self._parser.is_over else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    @property
    def has_tool_calls(self) -> bool:
        """Whether a tool was called."""
        return self._parser is not None and self._parser.num_calls > 0

    def emit_round(self, tokens: TokenRound) -> tuple[Round, list[StreamEvent]]:
        """What may be shown of this round, and its report without the tokens after which the answer was over."""
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
        """What was held back and belongs to the answer after all; `is_cut_off`: a limit ended it."""
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
        """What stop strings let through of text that has come, of all tokens but the last ones."""
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
    """What reads an answer to this prompt, which ends with `prefix`; None: there is nothing to read but text.

    Ids of calls follow from the prompt: one conversation has each of them once, and the same request the same ones.
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
        parser.push(TextDelta(prefix))  # what comes of it is known already
    return parser


def _read_prompt_end(tokenizer: MessageFormatTokenizer, prompt_ids: Sequence[int], prefix: str) -> str:
    """The last text of a prompt, marks included, without the answer's prefix that follows it.

    Prompt and prefix are encoded as one text, so that a token may have some of both.
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
