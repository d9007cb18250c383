"""What a release needs, beside building it; .github/workflows/release.yml calls it.

python tools/release.py notes v0.1.0          # the changelog's section, if tag, version and changelog agree
python tools/release.py readme URL COMMIT     # README.md, with links that work outside of the repository
python tools/release.py files dist            # the wheel has what it needs, and nothing else
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?![a-z][a-z+.-]*:|#)([^)\s]+)(\))")
# as the wheel names them; a part that is not Python is easily left out of a build
NEEDED: Final = (
    "llm_spec/__init__.py",
    "llm_spec/py.typed",
    "llm_spec/server/page/page.html",
    "llm_spec_cli/__init__.py",
    "llm_spec_http/__init__.py",
    "llm_spec_onnx/builtin/target/model.onnx",
    "llm_spec_onnx/builtin/draft/model.onnx",
)


class ReleaseError(Exception):
    """A release that must not be published; the message says what to change."""


def read_notes(tag: str, source: str, changelog: str) -> str:
    """The section of the changelog for a tag. `source`: of the module that has the version."""
    version = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if version != [tag.removeprefix("v")] or not tag.startswith("v"):
        raise ReleaseError(f"the tag is {tag}, and llm_spec.__version__ is {', '.join(version)}; change one of them")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, notes = section.partition("\n")
        if title.split(" ")[0] == version[0]:
            if not re.fullmatch(r"\S+ \(\d{4}-\d{2}-\d{2}\)", title):
                raise ReleaseError(
                    f"CHANGELOG.md has {title!r}; write the day of the release: {version[0]} (2026-01-31)"
                )
            return notes.strip() + "\n"
    raise ReleaseError(f"CHANGELOG.md has no section {version[0]}")


def make_links_absolute(text: str, repository: str, commit: str) -> str:
    """A page whose relative links lead to a repository's host, and whose pictures come from there."""

    def replace(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}{match[2]}{repository}/{kind}/{commit}/{match[3]}{match[4]}"

    return _LINK.sub(replace, text)


def check_files(folder: Path) -> str:
    """One line that counts the files of the one wheel and the one sdist in a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    if missing := [name for name in NEEDED if name not in names]:
        raise ReleaseError(f"the wheel lacks {', '.join(missing)}")
    others = {name.partition("/")[0] for name in names if not name.startswith("llm_spec")}
    if others:
        raise ReleaseError(f"the wheel has {', '.join(sorted(others))}, which would be installed beside the package")
    if links := [match[3] for match in _LINK.finditer(metadata)]:
        raise ReleaseError(f"links of the README lead nowhere on PyPI: {', '.join(links[:5])}")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in ("README.md", "LICENSE", "NOTICE", "tests/test_docs.py") if name not in sources]:
        raise ReleaseError(f"the sdist lacks {', '.join(missing)}")
    return f"{wheel.name}: {len(names)} files; {sdist.name}: {len(sources)} files"


def main(arguments: list[str]) -> int:
    """Do as the first argument says; the exit code is 1 if a release must not be published."""
    try:
        match arguments:
            case ["notes", tag]:
                source = (ROOT / "llm_spec" / "__init__.py").read_text(encoding="utf-8")
                print(read_notes(tag, source, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")
            case ["readme", repository, commit]:
                readme = ROOT / "README.md"
                text = make_links_absolute(readme.read_text(encoding="utf-8"), repository, commit)
                readme.write_text(text, encoding="utf-8")
            case ["files", folder]:
                print(check_files(Path(folder)))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
