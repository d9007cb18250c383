"""The pages of the site beside those in docs/, and the order of all: MkDocs calls this (`hooks` in mkdocs.yml).

- The API reference is written from the package: the public names by topic, and the packages for authors of providers.
- A file outside of docs/ that a page links to, such as an example, becomes a page.
- The navigation follows the home page: its headings, and below each the pages to which it links there (if it links to a
  page twice, there where it does so last). Other pages come after those, by folder.
"""

from __future__ import annotations

import os.path
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from site_docstrings import separate_lists

import llm_spec

_ROOT: Final = Path(__file__).parents[1]
_HOME: Final = "index.md"
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LANGUAGES: Final = {".py": "python", ".sh": "sh", ".toml": "toml", ".json": "json"}

# the public names by the module that has them; the first that fits
_TOPICS: Final[Mapping[str, str]] = {
    "llm_spec.decoder.config": "Configuration",
    "llm_spec.decoder.budget": "Configuration",
    "llm_spec.decoder.concurrency_limit": "Configuration",
    "llm_spec.decoder.pricing": "Configuration",
    "llm_spec.strategies": "Configuration",
    "llm_spec.decoder.result": "Results",
    "llm_spec.contract.stats": "Results",
    "llm_spec.decoder": "Decoder",
    "llm_spec.contract.request": "Requests and messages",
    "llm_spec.contract.messages": "Requests and messages",
    "llm_spec.contract.events": "Events",
    "llm_spec.contract.errors": "Errors",
    "llm_spec.drafting": "Drafts",
    "llm_spec.local.lookahead": "Number of drafted tokens",
    "llm_spec.contract": "Providers",
}
_TOPIC_ORDER: Final = (
    "Decoder",
    "Configuration",
    "Requests and messages",
    "Results",
    "Events",
    "Errors",
    "Drafts",
    "Number of drafted tokens",
    "Providers",
)
_PACKAGES: Final = ("llm_spec.contract", "llm_spec.kit", "llm_spec.local", "llm_spec.testing")


@event_priority(100)  # before the plugin that writes llms.txt lists the pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, and put all in order."""
    for uri, text in _write_reference():
        files.append(File.generated(config, uri, content=text))
    for path in sorted(_find_linked_files(files.documentation_pages())):
        uri = _find_uri(path)
        files.append(File.generated(config, uri, content=_show_file(path), inclusion=InclusionLevel.NOT_IN_NAV))
    home = files.get_file_from_path(_HOME)
    uris = {file.src_uri for file in files.documentation_pages() if file.inclusion.is_in_nav()}
    sections = arrange_pages("" if home is None else home.content_string, uris)
    config.nav = [_HOME, *({title: members} for title, members in sections.items())]
    config.plugins["llmstxt"].config["sections"] = {"Overview": [_HOME], **sections}
    return files


def arrange_pages(home: str, uris: set[str]) -> dict[str, list[str]]:
    """The sections of the navigation, and the pages of each."""
    headings: dict[str, str] = {}
    for part in re.split(r"^(?=## )", _FENCE.sub("", home), flags=re.MULTILINE):
        heading = part.partition("\n")[0].removeprefix("## ").strip() if part.startswith("## ") else "Guide"
        for uri in map(_find_uri, _iterate_links(part, _ROOT / "docs" / _HOME)):
            headings.pop(uri, None)
            headings[uri] = heading
    sections: dict[str, list[str]] = {}
    for uri, heading in headings.items():
        if uri in uris and not _is_index(uri):
            sections.setdefault(heading, []).append(uri)
    placed = {_HOME}.union(*sections.values())
    for uri in sorted(
        uris - placed, key=lambda uri: (uri.startswith("api/"), os.path.dirname(uri), not _is_index(uri), uri)
    ):
        sections.setdefault(_title_folder(uri), []).append(uri)
    return sections


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links out of docs/, and those of the files there, lead to the pages that show them."""
    source = _find_path(page.file)
    folder = os.path.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        path = _resolve(match[1], source)
        if path is None or (_is_in_docs(path) and _is_in_docs(source)):
            return match[0]
        return os.path.relpath(_find_uri(path), folder or ".") + (match[2] or "")

    return _map_prose(markdown, lambda prose: _LINK.sub(rewrite, prose))


def _write_reference() -> Iterator[tuple[str, str]]:
    """The pages of the API reference, and what mkdocstrings replaces in them."""
    topics: dict[str, list[str]] = {topic: [] for topic in _TOPIC_ORDER}
    for module, names in vars(llm_spec)["_NAMES_BY_MODULE"].items():
        topic = next(topic for prefix, topic in _TOPICS.items() if f"{module}.".startswith(f"{prefix}."))
        topics[topic] += names.split()
    lines = _begin_reference("llm_spec")
    for topic, members in topics.items():
        lines += [f"## {topic}", "", *(f"::: llm_spec.{name}\n" for name in sorted(members))]
    yield "api/llm_spec.md", "\n".join(lines)
    for package in _PACKAGES:
        yield f"api/{package}.md", _write_package(package)


def _begin_reference(package: str) -> list[str]:
    text = separate_lists((import_module(package).__doc__ or "").strip())
    return ["---", "search: {boost: 0.5}", "---", f"# {package}", "", text, ""]  # pages come first in the search


def _write_package(package: str) -> str:
    """One section for each module of a package that exports something."""
    parent = import_module(package)
    lines = _begin_reference(package)
    exported: list[str] = getattr(parent, "__all__", [])
    if exported:
        return "\n".join([*lines, *(f"::: {package}.{name}\n" for name in exported)])
    for found in pkgutil.iter_modules(parent.__path__, f"{package}."):
        names = getattr(import_module(found.name), "__all__", [])
        if names and not found.name.rpartition(".")[2].startswith("_"):
            lines += [f"## {found.name}", "", f"::: {found.name}", "    options:", "      members:"]
            lines += [f"        - {name}" for name in names]
            lines += ["      show_root_heading: false", "      show_root_toc_entry: false", ""]
    return "\n".join(lines)


def _find_linked_files(pages: Iterable[File]) -> set[Path]:
    """The files outside of docs/ that pages link to, and those that the Markdown files among them link to."""
    found: set[Path] = set()
    waiting = [(page.content_string, _find_path(page)) for page in pages]
    while waiting:
        for path in _iterate_links(*waiting.pop()):
            if path.is_file() and not _is_in_docs(path) and path not in found and path != _ROOT / "README.md":
                found.add(path)
                if path.suffix == ".md":
                    waiting.append((path.read_text(encoding="utf-8"), path))
    return found


def _iterate_links(markdown: str, source: Path) -> Iterator[Path]:
    for match in _LINK.finditer(_FENCE.sub("", markdown)):
        if (path := _resolve(match[1], source)) is not None:
            yield path


def _resolve(link: str, source: Path) -> Path | None:
    """The file that a link of a page names; None if it is not a path of this repository."""
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_relative_to(_ROOT) else None


def _is_in_docs(path: Path) -> bool:
    return path.is_relative_to(_ROOT / "docs")


def _find_path(file: File) -> Path:
    """The file of the repository that a page shows."""
    if not file.src_uri.startswith("repository/"):
        return _ROOT / "docs" / file.src_uri
    path = _ROOT / file.src_uri.removeprefix("repository/")
    return path if path.exists() else path.with_suffix("")


def _find_uri(path: Path) -> str:
    """The page that shows a file of the repository."""
    if _is_in_docs(path):
        return path.relative_to(_ROOT / "docs").as_posix()
    if path == _ROOT / "README.md":
        return _HOME
    name = path.relative_to(_ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def _show_file(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(_ROOT).as_posix()
    return f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def _rank_by_folder(uri: str) -> tuple[object, ...]:
    return uri.startswith("api/"), os.path.dirname(uri), not _is_index(uri), uri


def _is_index(uri: str) -> bool:
    return os.path.basename(uri) in {_HOME, "README.md"} or uri == "api/llm_spec.md"


def _title_folder(uri: str) -> str:
    folder = uri.partition("/")[0] if "/" in uri else ""
    return {"": "Guide", "api": "API reference"}.get(folder, folder.replace("-", " ").capitalize())


def _map_prose(markdown: str, change: Callable[[str], str]) -> str:
    """A page whose text outside of fences is changed."""
    parts: list[str] = []
    begin = 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[begin : fence.start()]), fence[0]]
        begin = fence.end()
    return "".join([*parts, change(markdown[begin:])])
