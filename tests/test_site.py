"""What `make site` does beside MkDocs: it finds broken links in the built pages, and reads docstrings as lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from site_links import find_broken_links

import llm_spec


def test_broken_links_of_a_built_site_are_found(tmp_path: Path) -> None:
    """Pages, anchors and files that are not there; pictures and scripts from other hosts."""
    (tmp_path / "api").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="api/">a</a><a href="api/index.html#one">b</a><a href="#top">c</a>'
        '<a href="https://example.com/#x">d</a><a href="file.txt">e</a><img src="file.txt"><a href="api/#%6Fne">f</a>'
        '<a href="gone.html">1</a><a href="#gone">2</a><a href="api/#gone">3</a><img src="gone.png">'
        '<script src="https://example.com/x.js"></script><link rel="stylesheet" href="//example.com/x.css">',
        encoding="utf-8",
    )
    (tmp_path / "api" / "index.html").write_text('<p id="one"><a href="..">up</a></p>', encoding="utf-8")
    (tmp_path / "file.txt").touch()
    assert find_broken_links(tmp_path) == [
        "index.html: gone.html leads nowhere",
        "index.html: #gone leads nowhere",
        "index.html: api/#gone leads nowhere",
        "index.html: gone.png is not there",
        "index.html: https://example.com/x.js is loaded from another host",
        "index.html: //example.com/x.css is loaded from another host",
    ]


DOCSTRING = """What it is.

first: a text; with more. second: on the
same line.
`third`, first: over
    two lines, other: text.
Fourth: a sentence.

    code: as it stands
"""
LISTED = """What it is.

- `first`: a text; with more.
- `second`: on the
  same line.
- `third`, `first`: over
  two lines, other: text.
  Fourth: a sentence.

    code: as it stands
"""


def test_descriptions_of_parameters_become_a_list() -> None:
    """The names of an object alone, wherever a line or a sentence begins with them."""
    site_docstrings = pytest.importorskip("site_docstrings", reason="needs mkdocstrings", exc_type=ImportError)
    assert site_docstrings.list_described_names(DOCSTRING, {"first", "second", "third"}) == LISTED
    assert site_docstrings.list_described_names("one: two", {"three"}) == "one: two"
    assert site_docstrings.separate_lists("Lists\n- a\n- b\n  c\n- d") == "Lists\n\n- a\n- b\n  c\n- d"


def test_the_api_reference_has_every_public_name_once() -> None:
    """Under one topic each."""
    site_pages = pytest.importorskip("site_pages", reason="needs MkDocs", exc_type=ImportError)
    pages = dict(site_pages._write_reference())
    named = re.findall(r"^::: llm_spec\.(\w+)$", pages["api/llm_spec.md"], re.MULTILINE)
    assert sorted(named) == sorted({*vars(llm_spec)["__all__"]} - {"__version__"})
    assert [topic for topic in site_pages._TOPIC_ORDER if f"## {topic}\n\n:::" not in pages["api/llm_spec.md"]] == []


def test_the_navigation_follows_the_home_page() -> None:
    """Headings and links give sections and pages, the last link of a page counts, and no page is left out."""
    site_pages = pytest.importorskip("site_pages", reason="needs MkDocs", exc_type=ImportError)
    home = (
        "# Home\n[a](a.md)\n```\n## no heading\n```\n## One\n[b](b.md#x) [a](a.md) [gone](gone.md)\n"
        "## Two\n[b](b.md), [d](d/README.md), [other](../LICENSE)\n"
    )
    uris = {"index.md", "a.md", "b.md", "c.md", "d/README.md", "d/1.md", "api/llm_spec.a.md", "api/llm_spec.md"}
    assert site_pages.arrange_pages(home, uris) == {
        "One": ["a.md"],
        "Two": ["b.md"],
        "Guide": ["c.md"],
        "D": ["d/README.md", "d/1.md"],
        "API reference": ["api/llm_spec.md", "api/llm_spec.a.md"],
    }
