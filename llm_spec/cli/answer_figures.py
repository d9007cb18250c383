"""The figures that `llm-spec run` shows below an answer, compared with the target alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llm_spec.decoder.result import PlainReason, SpeculativeResult

__all__ = ["WHAT_TO_DO", "ComparedAnswer", "describe_time"]

WHAT_TO_DO: Final[Mapping[PlainReason, str]] = {
    "request": "leave that option out",
    "seed": "leave --seed out, or give --temperature 0",
    "target": "name another --strategy, or use a server that takes token ids, such as vLLM or llama-server",
    "discovery": "try again: the server's capabilities were not found out in time",
    "baseline": "give a prompt with a longer answer",
    "not_worthwhile": "try other drafts and strategies; `llm-spec bench` compares them on your prompts",
    "not_measured": "give a prompt with a longer answer",
    "not_verified": "name another --strategy, or give a prompt with a longer answer; a server needs spare capacity",
    "budget": "raise --max-cost",
    "refused": "name another --strategy",
    "retried": "try again",
    "draft_failed": "repair the draft, or give another --draft",
    "nothing_drafted": "give a prompt whose text the answer repeats, or a --draft that is a model",
}


@dataclass(frozen=True, kw_only=True)
class ComparedAnswer:
    """An answer, and the target's own answer to the same request or None."""

    result: SpeculativeResult
    plain: SpeculativeResult | None = None

    @property
    def is_same_text(self) -> bool | None:
        """True if both answers have the same text; None if there is nothing to compare with."""
        return None if self.plain is None else self.plain.content == self.result.content

    @property
    def clock_speedup(self) -> float | None:
        """The target's time alone / the answer's time.

        None if there is nothing to compare with, or if the answers differ in text and length.
        """
        if self.plain is None:
            return None
        has_equal_length = self.result.num_tokens is not None and self.result.num_tokens == self.plain.num_tokens
        if not (self.is_same_text or has_equal_length):
            return None
        return self.plain.timings.total_s / self.result.timings.total_s

    @property
    def what_to_do(self) -> str | None:
        """A way to make the target speculate; None if it did, or if none is known."""
        return None if self.result.plain_reason is None else WHAT_TO_DO.get(self.result.plain_reason)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = self.result.to_dict() | {"what_to_do": self.what_to_do}
        if self.plain is None:
            return values
        return values | {
            "same_text_as_plain": self.is_same_text,
            "plain_clock_s": self.plain.timings.total_s,
            "clock_speedup": self.clock_speedup,
        }

    def describe(self) -> str:
        """Return the same in a few lines for people."""
        result, plain, clock = self.result, self.plain, self.clock_speedup
        # without a figure of the library, the clock of this one comparison gives it
        if plain is not None and clock is not None and result.speedup_range is None:
            plain_s, basis = plain.timings.total_s, "by the clock, one run of each"
            result = replace(result, plain_s=plain_s, plain_range_s=(plain_s, plain_s), speedup_basis=basis)
        lines = [result.summary()]
        if self.what_to_do is not None:
            lines.append(f"what to do: {self.what_to_do}")
        if result.stopped_by == "max_tokens":
            lines.append("the answer was cut off by --max-tokens")
        if plain is not None:
            texts = "the same text" if self.is_same_text else "a different text"
            ratio = ""
            if clock is None:
                texts += " of another length, so the times do not compare"
            elif self.result.speedup_range is not None or self.result.plain_reason is not None:
                ratio = f", which is {clock:.2f}x by the clock (one run of each)"
            lines.append(f"the target alone: {describe_time(plain)}{ratio}; {texts}")
        return "\n".join(lines)


def describe_time(result: SpeculativeResult) -> str:
    """Return the number of tokens and the time of an answer."""
    tokens = "" if result.num_tokens is None else f"{result.num_tokens} tokens in "
    return f"{tokens}{result.timings.total_s:.3f} s"
