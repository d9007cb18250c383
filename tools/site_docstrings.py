"""How mkdocstrings reads this package's docstrings, which are plain text: `name: what it is` becomes a list."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_NAME: Final = r"`?[a-z_]\w*`?"
_ITEM: Final = re.compile(rf"({_NAME}(?:, {_NAME})*): (?=\S)")
_SENTENCE: Final = re.compile(rf"(?<=[.;]) ({_NAME}(?:, {_NAME})*): (?=\S)")


class PlainDocstrings(griffe.Extension):
    """Makes a list of the lines that describe parameters or members, so that Markdown does not run them together."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:  # noqa: ARG002 - griffe's signature
        """Rewrite the docstrings of all classes and functions, once their members are known."""
        _rewrite_docstrings(pkg)


def _rewrite_docstrings(parent: griffe.Module | griffe.Class) -> None:
    for member in parent.members.values():
        if not isinstance(member, griffe.Class | griffe.Function):
            if isinstance(member, griffe.Module):
                _rewrite_docstrings(member)
            continue
        if member.docstring is not None:
            names = {parameter.name for parameter in member.parameters}
            if isinstance(member, griffe.Class):
                names |= member.all_members.keys()
            member.docstring.value = list_described_names(member.docstring.value, names)
        if isinstance(member, griffe.Class):
            _rewrite_docstrings(member)


def list_described_names(text: str, names: set[str]) -> str:
    """A docstring in which each description of one of `names` is an item of a Markdown list."""
    paragraphs = re.split(r"\n{2,}", separate_lists(text))
    return "\n\n".join(_list_names_of_paragraph(paragraph, names) for paragraph in paragraphs)


def separate_lists(text: str) -> str:
    """A text in which an empty line comes before each list, as Markdown needs it."""
    return re.sub(r"^((?!- | ).*\S.*)\n(?=- )", r"\1\n\n", text, flags=re.MULTILINE)


def _list_names_of_paragraph(paragraph: str, names: set[str]) -> str:
    if paragraph.startswith("    "):
        return paragraph  # code
    is_description = _ITEM.match(paragraph) is not None
    lines: list[str] = []
    for line in paragraph.split("\n"):
        # a second name may be described on the same line, after the first one's last sentence
        parts = _split_sentences(line, names) if is_description or _starts_item(line, names) else [line]
        for part in parts:
            if _starts_item(part, names):
                described, _, rest = part.partition(": ")
                title = ", ".join(f"`{name.strip('` ')}`" for name in described.split(","))
                lines += ([""] if lines and not lines[-1].startswith(("- ", "  ")) else []) + [f"- {title}: {rest}"]
            else:
                is_in_list = any(other.startswith("- ") for other in lines)
                lines.append(f"  {part.strip()}" if is_in_list else part)
    return "\n".join(lines)


def _starts_item(line: str, names: set[str]) -> bool:
    match = _ITEM.match(line)
    return match is not None and {name.strip("` ") for name in match[1].split(",")} <= names


def _split_sentences(line: str, names: set[str]) -> list[str]:
    parts: list[str] = []
    begin = 0
    for match in _SENTENCE.finditer(line):
        if {name.strip("` ") for name in match[1].split(",")} <= names:
            parts.append(line[begin : match.start()])
            begin = match.start() + 1
    return [*parts, line[begin:]]
