"""Parses an answer's text into text, reasoning and tool calls.

The result does not depend on how the text was cut. A possible beginning of a mark is held back, and
so is a call until it is whole. A call that breaks off, or whose JSON is invalid, is text. Only the
closing mark may be missing, if the answer ends or the next call begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from llm_spec.contract.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from llm_spec.contract.formats import SPACE, MessageFormat, ReasoningMarks
from llm_spec.local.detokenizing import HeldText, find_longest_partial_mark
from llm_spec.local.messages.calls import ToolCallScanner, parse_tool_calls

__all__ = ["MessageParser"]


class MessageParser:
    """The state of one answer; does no I/O.

    message_format, tool_names: how calls are written, and which tools there are; without either
        there are no calls.
    reasoning: the marks of reasoning, which may only begin an answer; with None, reasoning is text.
    is_reasoning: the prompt has opened the reasoning already.
    make_call_id: returns the id of the call at an index.
    max_calls: after this many calls the answer is over (`is_over`).
    """

    def __init__(
        self,
        message_format: MessageFormat | None,
        tool_names: Collection[str],
        reasoning: ReasoningMarks | None,
        *,
        is_reasoning: bool,
        make_call_id: Callable[[int], str],
        max_calls: int | None = None,
    ) -> None:
        self._format = message_format if tool_names else None
        self._tool_names = tool_names
        self._reasoning = reasoning or ReasoningMarks("", "")
        self._make_call_id = make_call_id
        self._max_calls = max_calls
        self._held = HeldText()
        starts_in_reasoning = is_reasoning and reasoning is not None
        self._state = self._read_reasoning if starts_in_reasoning else self._read_answer_text
        self._may_reason = bool(self._reasoning.open) and not starts_in_reasoning
        self._is_at_start = True  # only space and reasoning so far, or since the last call
        self._drops_space = starts_in_reasoning  # the next space stands between marks
        self._scanner: ToolCallScanner | None = None
        self._is_cut_off = False
        self._num_opening = 0  # characters held before a call's body: space and opening mark
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning."""
        return self._state == self._read_reasoning

    @property
    def is_over(self) -> bool:
        """True if all allowed calls have been written."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def push(self, delta: TextDelta) -> list[StreamEvent]:
        """Add text; return the events that may be shown now."""
        self._held.hold_delta(delta)
        return self._read_held_text(is_end=False)

    def flush(self, *, is_cut_off: bool = False) -> list[StreamEvent]:
        """Return what is still held back at the end of the answer.

        With `is_cut_off`, a limit ended it, neither its model nor a stop of the request. A call
        without its end is then text.
        """
        self._is_cut_off = is_cut_off
        return self._read_held_text(is_end=True)

    def _read_held_text(self, *, is_end: bool) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        while self._held.text and not self.is_over:
            state, num_held = self._state, len(self._held.text)
            events += state(is_end)
            if state == self._state and num_held == len(self._held.text):
                break
        return events

    # ------------------------------------------------------------------------------------ reasoning

    def _read_reasoning(self, is_end: bool) -> Sequence[StreamEvent]:
        self._drop_space_beside_marks()
        text, close = self._held.text, self._reasoning.close
        end = text.find(close)
        if end >= 0:
            written = self._held.drop_characters(end + len(close))[:end]
            self._state, self._drops_space = self._read_answer_text, True
        else:
            num_kept = 0 if is_end else find_longest_partial_mark(text, (close,))
            written = self._held.drop_characters(len(text[: len(text) - num_kept].rstrip(SPACE)))
            if is_end:
                self._held.drop_characters(len(self._held.text))
        return [ReasoningDelta(written.rstrip(SPACE))] if written.strip(SPACE) else []

    def _drop_space_beside_marks(self) -> None:
        """Drop space between marks and the text that they enclose."""
        if self._drops_space:
            text = self._held.text
            self._held.drop_characters(len(text) - len(text.lstrip(SPACE)))
            self._drops_space = not self._held.text

    def _try_to_open_reasoning(self) -> bool:
        """Open reasoning if the held text begins with it; return True if it does."""
        text = self._held.text
        start = len(text) - len(text.lstrip(SPACE))
        if not text.startswith(self._reasoning.open, start):
            return False
        self._held.drop_characters(start + len(self._reasoning.open))
        self._state, self._drops_space, self._may_reason = self._read_reasoning, True, False
        return True

    # ----------------------------------------------------------------------------------------- text

    def _read_answer_text(self, is_end: bool) -> Sequence[StreamEvent]:
        self._drop_space_beside_marks()
        if self._may_reason and self._try_to_open_reasoning():
            return ()
        text = self._held.text
        if is_end and self.num_calls and not text.strip(self._separator_characters):
            self._held.drop_characters(len(text))
            return ()
        opened = self._find_tool_call_start()
        if self._format is not None and opened is not None:
            start, body_start = opened
            released = self._release_text(len(text[:start].rstrip(SPACE)))
            self._num_opening = body_start - (len(text) - len(self._held.text))
            self._scanner = ToolCallScanner(self._format)
            self._state = self._read_tool_call
            return released
        return self._release_text(len(text) if is_end else len(text) - self._count_held_back_characters(text))

    def _find_tool_call_start(self) -> tuple[int, int] | None:
        """Return where a call and its body begin in the held text, or None if there is none yet."""
        if self._format is None:
            return None
        text = self._held.text
        start = text.find(self._format.call_open)
        if self._format.is_bare and self._is_at_start:
            first = len(text) - len(text.lstrip(self._separator_characters))
            if text[first : first + 1] == "{":
                return 0, first
        return None if start < 0 else (start, start + len(self._format.call_open))

    @property
    def _separator_characters(self) -> str:
        """The characters that may stand between two calls."""
        return SPACE if self._format is None or not self.num_calls else SPACE + self._format.separator

    def _count_held_back_characters(self, text: str) -> int:
        """Return how many last characters may belong to a mark or are space before one."""
        marks: list[str] = []
        if self._format is not None:
            marks.append(self._format.call_open)
        if self._may_reason:
            marks.append(self._reasoning.open)
        shown = text[: len(text) - find_longest_partial_mark(text, marks)]
        if self._format is not None or (self._is_at_start and marks):
            shown = shown.rstrip(self._separator_characters if self._is_at_start else SPACE)
        return len(text) - len(shown)

    def _release_text(self, num_characters: int) -> Sequence[StreamEvent]:
        released = self._held.release_characters(num_characters)
        if any(delta.text.strip(SPACE) for delta in released):
            self._is_at_start = self._may_reason = False
        return released

    # ---------------------------------------------------------------------------------------- calls

    def _read_tool_call(self, is_end: bool) -> Sequence[StreamEvent]:
        scanner = self._scanner
        if scanner is None:
            return ()
        num_scanned = self._num_opening + scanner.num_characters
        scanner.feed(self._held.text[num_scanned:])
        if scanner.state == "open" and not is_end:
            return ()
        if not self._is_cut_off:
            scanner.end_answer()
        calls = parse_tool_calls(scanner, self._tool_names) if scanner.state == "complete" else None
        self._scanner, self._state, self._may_reason = None, self._read_answer_text, False
        if calls is None:  # it is text, in which another call may begin
            self._is_at_start = False
            return self._release_text(max(1, self._num_opening))
        self._held.drop_characters(self._num_opening + scanner.end)
        self._is_at_start = True
        deltas: list[StreamEvent] = []
        for call in calls[: None if self._max_calls is None else self._max_calls - self.num_calls]:
            deltas.append(ToolCallDelta(self.num_calls, self._make_call_id(self.num_calls), call.name, call.arguments))
            self.num_calls += 1
        return deltas
