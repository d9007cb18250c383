"""Markdown files: links within the repository lead somewhere, and the commands they give are the Makefile's."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
LINK: Final = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"(`+).+?\1")


@cache
def prose(page: Path) -> str:
    """The text of a page without its code, in which brackets mean something else."""
    return CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that hosts of repositories give to a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        num_before = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
        found.append(f"{anchor}-{num_before}" if num_before else anchor)
    return frozenset(found)


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of it; other hosts are not asked."""
    broken: list[str] = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Each file and each anchor that a page names is there."""
    assert broken_links(ROOT / page) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    """A missing file, a missing heading here and in another page; but not code, nor other hosts."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n## One two\n[a](gone.md) [b](#three) [c](#one-two) [d](#one-two-1) [e](https://example.com/#f)\n"
        "`[g](gone.md)`\n```\n[h](gone.md)\n```\n![image: [i]](gone.png) [j](#one--two)\n",
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROOT", tmp_path)
        assert broken_links(page) == ["gone.md", "#three", "gone.png", "#one--two"]


PAGES_ABOUT_CODE: Final = ("architecture.md", "start/provider.md")


def find_missing_names(page: str) -> list[str]:
    """The paths in backticks that are not there, and the names in backticks that no source file has."""
    files = [*ROOT.glob("llm_spec/**/*.py"), *ROOT.glob("providers/**/*.py"), *ROOT.glob("examples/*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    missing: list[str] = []
    for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page)):
        if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", code) and "NAME" not in code:
            missing += [] if (ROOT / code).exists() else [code]
        elif re.fullmatch(r"[\w.]+(\([\w=…]*\))?", code) and not (ROOT / code).exists():
            missing += [code for word in re.findall(r"\w+", code) if word not in words]
    return missing


@pytest.mark.parametrize("page", PAGES_ABOUT_CODE)
def test_what_pages_about_the_code_name_exists(page: str) -> None:
    """Paths and names in backticks."""
    assert find_missing_names((ROOT / "docs" / page).read_text(encoding="utf-8")) == []


def test_names_that_are_gone_are_found() -> None:
    assert find_missing_names("`llm_spec/gone.py` `GoneClass` `llm_spec/__init__.py` `ChatRequest` `x = y`") == [
        "llm_spec/gone.py",
        "GoneClass",
    ]


def recipe(target: str) -> list[str]:
    """The commands of a make target, as a contributor's make would run them."""
    variables = ["REPORTS=", "STEPS="]  # CI sets them, to collect what its steps report
    command = ["make", "--no-print-directory", "--dry-run", target, *variables]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [re.sub(r'^tools/step\.sh ("[^"]*"|\S+) ', "", line).strip() for line in printed.splitlines()]


def test_the_readme_gives_the_commands_of_the_makefile() -> None:
    """What a reader types without make is what `make setup test` runs, and what CI takes from the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(.* && pytest [^`]*)`", readme)
    assert commands == [" && ".join([*recipe("setup"), *recipe("test")])]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", ".pre-commit-config.yaml", ".ci/run", ".github/workflows/ci.yml"]
)
def test_make_targets_that_are_named_exist(page: str) -> None:
    """`make x` means a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / page).read_text(encoding="utf-8")
    for words in re.findall(r"(?:^|`|nice |run: )make(?: --[a-z=\d-]+)*((?: [a-z][a-z-]*)+)", text, re.MULTILINE):
        assert set(words.split()) <= targets, words
