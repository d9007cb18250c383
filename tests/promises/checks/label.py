"""Strategy and guarantee are what is documented, and `same_text` is true of the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from llm_spec import AnswerStarted, Retry, SpeculativeResult
from promises.checks.base import (
    UNDECODED,
    can_be_plain,
    has_by_text,
    has_ended_before,
    has_one_text,
    is_sampled,
    must_be_plain,
)
from promises.run import Outcome, Shown

__all__ = ["find_wrong_labels"]

_EXACT: Final = frozenset({"exact"})
_GUARANTEES: Final[Mapping[str, AbstractSet[str]]] = {
    **dict.fromkeys(("plain", "probe", "score", "predict", "regenerate", "tokens"), _EXACT),
    "race": frozenset({"exact", "exact-text"}),
    "judge": frozenset({"judged"}),
}


def find_wrong_labels(outcome: Outcome, shown: Shown) -> Iterator[str]:
    """What a result says of the text and of how it came about."""
    result = shown.result
    if result is None:
        return
    yield from _strategy(outcome, shown, result)
    allowed = _allowed(outcome, shown, result)
    if result.guarantee not in allowed:
        yield f"guarantee {result.guarantee} of {result.strategy}; it must be one of {sorted(allowed)}"
    if result.same_text:
        yield from _same_text(outcome, shown, result)


def _strategy(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    case, name = outcome.case, result.strategy
    if case.strategy == "auto":
        if name != "plain" and (case.draft == "none" or must_be_plain(case, shown)):
            yield f"strategy {name} where only plain can serve"
        if name in ("judge", "regenerate"):
            yield f"auto chose {name}"
    elif name != case.strategy:
        is_tried = result.plain_reason == "baseline" and case.baseline_every > 0
        is_unknown = case.num_failing_trials > 0 or (case.discover_s is not None and not case.waits_for_discovery)
        is_tried = is_tried or (result.plain_reason == "discovery" and is_unknown)
        is_lost = any(other.ask.fault is not None and other.ask.fault.how == "lost" for other in outcome.shown)
        is_tried = is_tried or (result.plain_reason == "target" and (is_lost or not case.continues))
        # where one token may complete two stop strings, servers differ in which of them counts
        is_tried = is_tried or (result.plain_reason == "request" and len(shown.ask.stop) > 1)
        is_plain = case.draft == "none" or can_be_plain(case, shown) or has_ended_before(shown) or is_tried
        if not (is_plain and name == "plain"):
            yield f"strategy {case.strategy} was configured, the result says {name}"
    if name == "plain" and result.plain_reason is None:
        yield "the answer is plain, and nothing says why"
    for _, event in shown.events:
        if isinstance(event, AnswerStarted) and event.strategy != name and not has_ended_before(shown):
            yield f"it started with {event.strategy} and ended with {name}"


def _allowed(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> AbstractSet[str]:
    """The guarantees that an answer may have."""
    case = outcome.case
    if case.acceptance == "lossy_typical" and result.strategy == "tokens":
        return {"lossy"}
    allowed = set(_GUARANTEES[result.strategy])
    is_continued = any(isinstance(event, Retry) and event.is_continued for _, event in shown.events)
    if is_continued:  # at best
        return (allowed | {"exact-text"}) - {"exact"}
    if (shown.ask.whole and result.retries) or (has_by_text(outcome, shown) and case.strategy != "auto"):
        allowed.add("exact-text")
    if case.strategy == "auto" and result.strategy == "race" and not result.retries:
        allowed.discard("exact-text")
    if has_by_text(outcome, shown) and "exact" in allowed:
        allowed.add("exact-text")  # it lost its token ids on the way
    if result.strategy == "judge" and not result.approved_spans:
        allowed.add("exact")  # then it is the target's own answer, as for any other
    if has_ended_before(shown):
        allowed |= {"exact", "exact-text"}
    return allowed


def _same_text(outcome: Outcome, shown: Shown, result: SpeculativeResult) -> Iterator[str]:
    case, plain = outcome.case, outcome.plain[shown.tag]
    if is_sampled(shown) and result.strategy not in ("plain", "regenerate") and not case.is_local:
        yield "same_text of a sampled answer of a server"
    text = result.content.rstrip(UNDECODED)
    if has_one_text(case, shown) and not plain.text.rstrip(UNDECODED).startswith(text):
        yield f"same_text, but {result.content!r} is not of {plain.text!r}"
    if result.guarantee != "exact":
        yield f"same_text of a text that is {result.guarantee}"
