"""A release is stopped where tag, version, changelog, README or files do not fit together; actions are pinned."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from release import NEEDED, ReleaseError, check_files, make_links_absolute, read_notes

import llm_spec

ROOT = Path(__file__).parent.parent
SOURCE = '__version__ = "1.2.0"\n'
CHANGELOG = "# Changelog\n\n## 1.2.0 (2026-01-31)\n\n### Decoder\n- a\n\n## 1.1.0 (2026-01-01)\n- b\n"


def test_notes_are_the_section_of_the_version() -> None:
    """Without its title, and without the next section."""
    assert read_notes("v1.2.0", SOURCE, CHANGELOG) == "### Decoder\n- a\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.2.1", CHANGELOG, "the tag is v1.2.1"),
        ("1.2.0", CHANGELOG, "the tag is 1.2.0"),
        ("v1.2.0", CHANGELOG.replace("1.2.0", "1.2.0rc1"), "no section 1.2.0"),
        ("v1.2.0", CHANGELOG.replace("2026-01-31", "unreleased"), "write the day"),
    ],
)
def test_a_release_that_does_not_fit_together_is_refused(tag: str, changelog: str, message: str) -> None:
    """Tag and version differ, or the changelog has no section for it, or an open one."""
    with pytest.raises(ReleaseError, match=message):
        read_notes(tag, SOURCE, changelog)


def test_the_version_of_this_tree_has_a_section() -> None:
    """The version is found where the build finds it, and the changelog begins with it."""
    source = (ROOT / "llm_spec" / "__init__.py").read_text(encoding="utf-8")
    dated = re.sub(r"\(unreleased\)", "(2026-01-31)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert read_notes(f"v{llm_spec.__version__}", source, dated)


def test_links_of_the_readme_lead_to_the_repository() -> None:
    """Relative ones alone; pictures come from where files are raw."""
    text = "[a](docs/a.md#b) ![c [d]](e.png) [f](https://example.com) [g](#h)"
    assert make_links_absolute(text, "https://host/org/name", "abc") == (
        "[a](https://host/org/name/blob/abc/docs/a.md#b) ![c [d]](https://host/org/name/raw/abc/e.png) "
        "[f](https://example.com) [g](#h)"
    )


def test_what_a_wheel_needs_is_in_the_checkout() -> None:
    """A file that moved would have every wheel refused."""
    missing = [name for name in NEEDED if not ((ROOT / name).is_file() or (ROOT / "providers" / name).is_file())]
    assert missing == []


def write_distributions(folder: Path, names: tuple[str, ...], readme: str) -> None:
    with zipfile.ZipFile(folder / "llm_spec-1-py3-none-any.whl", "w") as archive:
        for name in names:
            archive.writestr(name, "")
        archive.writestr("llm_spec-1.dist-info/METADATA", f"Name: llm-spec\n\n{readme}")
    with tarfile.open(folder / "llm_spec-1.tar.gz", "w:gz") as archive:
        for name in ("README.md", "LICENSE", "NOTICE", "tests/test_docs.py"):
            archive.addfile(tarfile.TarInfo(f"llm_spec-1/{name}"), io.BytesIO())


def test_what_a_wheel_has_is_checked(tmp_path: Path) -> None:
    """Models and pages are in it."""
    write_distributions(tmp_path, NEEDED, "[a](https://example.com)")
    assert check_files(tmp_path) == "llm_spec-1-py3-none-any.whl: 8 files; llm_spec-1.tar.gz: 4 files"


@pytest.mark.parametrize(
    ("names", "readme", "message"),
    [
        (NEEDED[:-1], "", "lacks llm_spec_onnx/builtin/draft/model.onnx"),
        ((*NEEDED, "tests/test_docs.py"), "", "has tests, which"),
        (NEEDED, "[a](docs/a.md)", "nowhere on PyPI: docs/a.md"),
    ],
)
def test_a_wheel_that_is_wrong_is_refused(tmp_path: Path, names: tuple[str, ...], readme: str, message: str) -> None:
    """A file too few, a file too many, a link that works in the repository alone."""
    write_distributions(tmp_path, names, readme)
    with pytest.raises(ReleaseError, match=message):
        check_files(tmp_path)


def test_actions_are_pinned() -> None:
    """By the full hash of a commit, the same for each use, with the version beside it."""
    pins: dict[str, set[str]] = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action, pin in re.findall(r"uses: ([^@\s.][^@\s]*)(.*)", path.read_text(encoding="utf-8")):
            pins.setdefault(action, set()).add(pin)
    assert len(pins) == 6
    for action, found in pins.items():
        assert len(found) == 1, action
        assert re.fullmatch(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", found.pop()), action
