"""What pages in docs/ list is what there is: reasons, errors, figures, options, models, metrics."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from llm_spec import LlmSpecError, SpeculativeConfig
from llm_spec.contract import errors
from llm_spec.decoder.result import PLAIN_REASONS
from llm_spec.server.config import KeyConfig, ModelConfig, ServerConfig

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
CODE: Final = re.compile(r"`([^`\n]+)`")
_NOT_IN_FILES: Final = {"session_key", "speculative", "providers"}  # fields whose name no file has, or as a table


@cache
def read_page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def iterate_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of all tables, but for their heads."""
    for table in re.findall(r"^\|.*\n\| ---.*\n((?:\|.*\n?)+)", text, re.MULTILINE):
        for line in table.splitlines():
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def list_first_codes(name: str) -> list[str]:
    """What the first cells of a page's tables have in backticks."""
    return [code for cells in iterate_rows(read_page(name)) for code in CODE.findall(cells[0])]


def list_missing(wanted: set[str], name: str) -> set[str]:
    """Which words no backticks of a page have."""
    return wanted - {word for code in CODE.findall(read_page(name)) for word in re.findall(r"\w+", code)}


# ------------------------------------------------------------------------------------------ lists that are complete


def test_each_plain_reason_has_its_row() -> None:
    """With cause and cure, in the order of the source."""
    rows = list(iterate_rows(read_page("plain.md")))
    assert [cells[0].strip("`") for cells in rows] == list(PLAIN_REASONS)
    assert [cells for cells in rows if len(cells) != 3 or not all(cells)] == []


def test_each_class_of_errors_has_its_row() -> None:
    """Those that a caller may see; their parent's row holds for subclasses that differ in what is to be changed."""
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    classes -= {"LlmSpecError", "DraftError", "MissingExtraError", "UnknownProviderError"}
    assert all(issubclass(getattr(errors, name), LlmSpecError) for name in classes)
    assert classes <= set(list_first_codes("errors.md"))


def test_each_option_of_a_decoder_is_named() -> None:
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert list_missing(fields, "config.md") == set()


def test_each_key_of_the_server_s_config_is_named() -> None:
    kinds = (ServerConfig, ModelConfig, KeyConfig)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)} - _NOT_IN_FILES
    assert list_missing(fields, "start/operator.md") == set()


def test_each_kind_of_model_is_named() -> None:
    """Those that this repository installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kinds = set(project["entry-points"]["llm_spec.providers"])
    assert list_missing(kinds, "models.md") == set()


# ------------------------------------------------------------------------------------------ what is quoted


@cache
def list_source_texts() -> list[str]:
    """Every text of the sources, with `…` for what is put in."""
    texts: list[str] = []
    for path in [*ROOT.glob("llm_spec/**/*.py"), *ROOT.glob("providers/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def is_in_sources(quoted: str) -> bool:
    """Whether a text of the sources has the fixed parts of what is quoted, in order, where `…` stands for anything.

    A short part, such as an index, may be put in by the sources.
    """
    parts = [re.escape(part.strip()) for part in quoted.split("…") if len(part.strip()) > 3]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return bool(parts) and any(pattern.search(text) for text in list_source_texts())


def list_quoted_errors() -> list[str]:
    """The texts of errors that the page explains: codes with spaces, in the first two cells of a row."""
    cells = [cell for row in iterate_rows(read_page("errors.md")) for cell in row[:2]]
    return [code for cell in cells for code in CODE.findall(cell) if code.count(" ") > 2]


def test_errors_are_quoted_as_they_are() -> None:
    """But for `messages[0]` and the like, which are put in."""
    quoted = [re.sub(r"^\w+\[0\]", "…", text) for text in list_quoted_errors()]
    assert len(quoted) > 40
    assert [text for text in quoted if not is_in_sources(text)] == []


def test_what_no_source_says_is_found() -> None:
    assert is_in_sources("… needs a key; set … or give api_key")
    assert not is_in_sources("… needs a key; please set …")


def test_metrics_are_named_as_they_are() -> None:
    """With the ending `_total` that counters get."""
    source = (ROOT / "llm_spec" / "server" / "metrics.py").read_text(encoding="utf-8")
    names = re.findall(r"`(llm_spec_\w+)`", read_page("start/operator.md"))
    assert len(names) > 10
    assert [name for name in names if f'"{name.removesuffix("_total")}"' not in source] == []


def test_figures_of_the_home_page_are_measured() -> None:
    """Each is in the measurements, to the digit."""
    figures = [figure for row in iterate_rows(read_page("index.md")) for figure in re.findall(r"\d+\.\d+x", row[-1])]
    measured = set(re.findall(r"\d+\.\d+(?=x|;|\s)", read_page("measurements.md")))
    assert len(figures) > 15
    assert [figure for figure in figures if figure.removesuffix("x") not in measured] == []


# ------------------------------------------------------------------------------------------ finding it


def test_each_page_is_one_click_away() -> None:
    """From the home page; decisions have a list of their own."""
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", read_page("index.md"))}
    assert [page for page in PAGES if page not in {*linked, "index.md"} and not page.startswith("decisions/")] == []


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("decisions/")])
def test_commands_install_from_a_checkout(page: str) -> None:
    """There is no release: a name of a package index would lead to an error, or to somebody else's package."""
    assert re.findall(r"(?:pip|llm) install ['\"]?llm[-_]spec", read_page(page)) == []
