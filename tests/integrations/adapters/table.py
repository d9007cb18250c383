"""What each adapter supports of what its framework's own model for OpenAI offers: found out, and written in the docs.

    PYTHONPATH=tests python -m integrations.adapters.table [--write] [NAME…]   # in the environment of these tests

writes the table of docs/adapters.md, and takes out of known_faults.py what is no fault any more. Without `--write` it
prints what is not as with the framework's own model, and what came: of all adapters and rows, or of those named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

from .known_faults import ON_PURPOSE
from .probes import Adapter, NotApplicableError, Seen
from .rows import ROWS, Row
from .with_langchain import LangChain
from .with_litellm import LiteLlm
from .with_llm import LlmPlugin
from .with_openai_agents import OpenAiAgents
from .with_pydantic_ai import PydanticAi

__all__ = ["ADAPTERS", "PAGE", "Cell", "Outcome", "build_page", "find_cell", "is_fault"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "adapters.md"
ADAPTERS: Final[Sequence[Adapter]] = (LangChain(), PydanticAi(), OpenAiAgents(), LiteLlm(), LlmPlugin())
_FAULTS_FILE: Final = Path(__file__).parent / "known_faults.py"
_BEGIN: Final = "<!-- The test of this table writes it: tests/integrations/adapters/table.py -->\n"
_END: Final = "<!-- end of the table -->\n"

Outcome: TypeAlias = Literal[
    "supported", "more", "refused", "warns", "not offered", "not applicable", "on purpose", "ignored", "differs"
]
_WORDS: Final[dict[Outcome, str]] = {
    "supported": "yes",
    "more": "yes +",
    "not offered": "no",
    "not applicable": "n/a",
    "on purpose": "other",
}


@dataclass(frozen=True)
class Cell:
    """What an adapter makes of a row, whole and streamed; `notes` say why it does not apply, or is so, or what came."""

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()


@cache
def find_cell(adapter: Adapter, row: Row) -> Cell:
    """Try a row with an adapter and with its framework's own model."""
    found = [_find_outcome(adapter, row, streamed=streamed) for streamed in row.modes]
    outcomes = tuple(outcome for outcome, _ in found)
    return Cell(outcomes, tuple(dict.fromkeys(note for _, note in found if note)))


def _find_outcome(adapter: Adapter, row: Row, *, streamed: bool) -> tuple[Outcome, str]:
    """The outcome, and what there is to say about it."""
    try:
        is_offered = row.check(row.try_with(adapter, streamed=streamed, own=True), adapter)
    except NotApplicableError:
        is_offered = False
    try:
        ours = row.try_with(adapter, streamed=streamed, own=False)
    except NotApplicableError as reason:
        return "not applicable", str(reason)
    if row.check(ours, adapter):
        return ("supported" if is_offered else "more"), ""
    if not is_offered:
        return "not offered", ""
    if reason := ON_PURPOSE.get((adapter.name, row.id)):
        return "on purpose", reason
    return _find_difference(row, ours)


def _find_difference(row: Row, ours: Seen) -> tuple[Outcome, str]:
    if any(name in warning for name in row.names for warning in ours.warnings):
        return "warns", ""
    if ours.error is None:
        return ("ignored" if row.is_option else "differs"), row.describe(ours)
    is_refusal = not ours.bodies and any(word in str(ours.error) for word in row.names)
    return ("refused" if is_refusal else "differs"), f"{type(ours.error).__name__}: {ours.error}"


# ---------------------------------------------------------------------------------------------- the page


def build_page(page: str) -> str:
    """The page with the table as it is found."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return before + _BEGIN + "\n" + _build_table() + "\n" + _END + after


def _build_table() -> str:
    names = [adapter.name for adapter in ADAPTERS]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    reasons: list[str] = []
    group = ""
    for row in ROWS:
        if row.group != group:
            group = row.group
            lines.append(f"| **{group}** |" + " |" * len(names))
        cells = [_write_cell(find_cell(adapter, row), reasons) for adapter in ADAPTERS]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def _write_cell(cell: Cell, reasons: list[str]) -> str:
    words = list(dict.fromkeys(_WORDS.get(outcome, outcome) for outcome in cell.outcomes))
    text = words[0] if len(words) == 1 else f"{words[0]}, streamed: {words[1]}"
    if {"not applicable", "on purpose"}.isdisjoint(cell.outcomes):
        return text
    for reason in cell.notes:
        if reason not in reasons:
            reasons.append(reason)
    return f"{text} ({', '.join(str(reasons.index(reason) + 1) for reason in cell.notes)})"


def _print_faults(names: Sequence[str]) -> None:
    for adapter in ADAPTERS:
        for row in ROWS:
            if names and adapter.name.strip("`").lower() not in names and row.id not in names:
                continue
            cell = find_cell(adapter, row)
            if not {"supported", "more"}.issuperset(cell.outcomes):
                notes = " | ".join(re.sub(r"\s+", " ", note)[:300] for note in cell.notes)
                print(f"{adapter.name:14} {row.id:28} {' / '.join(cell.outcomes)}: {notes}", flush=True)  # noqa: T201


def is_fault(adapter: Adapter, row: Row) -> bool:
    """Whether the framework's own model does it, and ours neither does it nor says that it does not."""
    return not {"ignored", "differs"}.isdisjoint(find_cell(adapter, row).outcomes)


def _forget_mended_faults() -> None:
    faults = {(adapter.name, row.id) for adapter in ADAPTERS for row in ROWS if is_fault(adapter, row)}
    found = {f'("{adapter}", "{row}")' for adapter, row in faults | ON_PURPOSE.keys()}
    lines = _FAULTS_FILE.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if (key := re.match(r" +(\(.*?\)):", line)) is None or key[1] in found]
    _FAULTS_FILE.write_text("".join(kept), "utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(build_page(PAGE.read_text("utf-8")), "utf-8")
        _forget_mended_faults()
    else:
        _print_faults([name.lower() for name in sys.argv[1:]])
