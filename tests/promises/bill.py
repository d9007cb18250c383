"""What the calls of a request cost, as their servers know it: what was read, and what was written and sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llm_spec import Finish, StreamEvent, TargetError, TextDelta, TransientError, Usage
from llm_spec.measure.tokens import count_answer_tokens_in_event

__all__ = ["Bill"]


@dataclass(eq=False)
class Bill:
    """One call. `counted`: what its server said at its end; a call that is left has only what was sent by then.

    num_input: None where it can be told by the server alone. is_void: it failed before it was read.
    """

    num_input: int | None = None
    num_output: int = 0
    counted: Usage | None = None
    is_void: bool = False
    has_sent: bool = False

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A server that refuses, or is gone, has read nothing, unless something came before."""
        try:
            yield
        except Exception as error:
            was_read = isinstance(error, TargetError) and error.status is None and not isinstance(error, TransientError)
            self.is_void = not (self.has_sent or was_read)
            raise

    def send(self, event: StreamEvent) -> None:
        """It is on its way to the caller."""
        self.has_sent = True
        if isinstance(event, Finish):
            self.counted = event.usage
        elif isinstance(event, TextDelta) and event.token_ids is not None:
            self.num_output += len(event.token_ids)
        else:
            self.num_output += count_answer_tokens_in_event(event)

    @property
    def output_tokens(self) -> int:
        if self.is_void:
            return 0
        return self.num_output if self.counted is None else self.counted.output_tokens

    @property
    def input_tokens(self) -> int | None:
        if self.is_void:
            return 0
        return self.num_input if self.counted is None else self.counted.input_tokens
