"""What several checks ask of a case, a request and what the target has generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from promises.draw import Case
from promises.run import Outcome, Shown

__all__ = [
    "EPSILON_S",
    "UNDECODED",
    "can_be_plain",
    "has_by_text",
    "has_ended_before",
    "has_one_text",
    "is_boundary",
    "is_cut",
    "is_judged",
    "is_sampled",
    "must_be_plain",
    "num_shown",
    "num_tokens",
    "walk",
]

EPSILON_S: Final = 0.02  # by virtual clock: what asyncio itself and rounding may take
UNDECODED: Final = "\N{REPLACEMENT CHARACTER}"


def is_cut(shown: Shown) -> bool:
    """Whether something but the answer's own end, a stop string or its caps in tokens ended it."""
    return shown.result is None or shown.result.stopped_by in ("deadline", "max_iterations", "budget")


def is_sampled(shown: Shown) -> bool:
    return bool(shown.ask.temperature)


def has_one_text(case: Case, shown: Shown) -> bool:
    """Whether there is one text that the target alone gives."""
    if not is_sampled(shown):
        return True
    return case.is_local and shown.ask.seed is not None and case.acceptance == "coupled"


def is_judged(case: Case, shown: Shown) -> bool:
    return case.strategy == "judge" if shown.result is None else shown.result.guarantee == "judged"


def can_be_plain(case: Case, shown: Shown) -> bool:
    """Where README says that servers' answers are plain."""
    has_seed = shown.ask.temperature != 0.0 and shown.ask.seed is not None and not case.is_local
    return bool(shown.ask.odd) or has_seed


def must_be_plain(case: Case, shown: Shown) -> bool:
    """The same without `predict`, which is only one field more of one request."""
    is_taken = case.takes_prediction and shown.ask.odd not in ("tools", "presence_penalty", "frequency_penalty")
    return can_be_plain(case, shown) and not is_taken


def has_ended_before(shown: Shown) -> bool:
    """Whether it ended before the target had anything to answer: no budget or no time was left."""
    result = shown.result
    return result is not None and result.stopped_by in ("budget", "deadline") and not result.content


def has_by_text(outcome: Outcome, shown: Shown) -> bool:
    """Whether the target was given the text of its answer to go on from."""
    return any(tag == shown.tag for tag, _, _ in outcome.ledger.by_text)


def walk(outcome: Outcome, shown: Shown, text: str, *, by_text: bool = True) -> Mapping[int, tuple[int, int]]:
    """Where in the answer's bytes a path of generated tokens leads, and how many tokens that takes, least and most."""
    ledger, topic = outcome.ledger, f"topic{shown.ask.topic}"
    begun, data = shown.request.prefix.encode(), text.rstrip(UNDECODED).encode()
    reached: dict[int, tuple[int, int]] = {0: (0, 0)}
    for at in range(len(data) + 1):
        if at not in reached:
            continue
        key, (least, most) = (shown.tag, topic, begun + data[:at]), reached[at]
        tokens = ledger.edges.get(key, set()) | (ledger.by_text.get(key, set()) if by_text else set())
        for token in tokens:
            rest, end = data[at:], at + len(token)
            if rest.startswith(token) or token.startswith(rest):
                old_least, old_most = reached.get(end, (least + 1, most + 1))
                reached[end] = (min(old_least, least + 1), max(old_most, most + 1))
                whole = _find_last_boundary(data, at, end)  # a token that broke off within a character
                if by_text and end > whole > at and (shown.tag, topic, begun + data[:whole]) in ledger.by_text:
                    reached.setdefault(whole, reached[end])
    return reached


def _find_last_boundary(data: bytes, start: int, end: int) -> int:
    """The last place of `start` to `end` where a character ends; `start` where there is none."""
    return next((at for at in range(min(end, len(data)), start, -1) if is_boundary(data, at)), start)


def num_shown(outcome: Outcome, shown: Shown, text: str) -> int:
    """How many events a text came in, at least: what can be counted of a stream whose provider does not say.

    A token that ends within a character is not seen, and several may come in one event.
    """
    case, ends = outcome.case, walk(outcome, shown, text)
    data = text.rstrip(UNDECODED).encode()
    num_whole = sum(1 for end in ends if 0 < end <= len(data) and is_boundary(data, end))
    least, _ = num_tokens(outcome, shown, text)
    return min(least, num_whole) // case.frame


def is_boundary(data: bytes, at: int) -> bool:
    """Whether a character of UTF-8 ends there."""
    return at == len(data) or data[at] & 0xC0 != 0x80


def num_tokens(outcome: Outcome, shown: Shown, text: str) -> tuple[int, int]:
    """How many of the target's tokens a text has, at least and at most; zeros for one that it did not generate."""
    size = len(text.rstrip(UNDECODED).encode())
    counts = [count for end, count in walk(outcome, shown, text).items() if end >= size]
    return (min(least for least, _ in counts), max(most for _, most in counts)) if counts else (0, 0)
