"""The last step of `make site`: every link and anchor of the built site leads somewhere, and it loads nothing else.

Strict mode checks the links of Markdown sources. This reads the HTML that came of it, API reference and theme included.
"""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


class _PageParser(HTMLParser):
    """The ids and the links of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") not in {"canonical", "next", "prev"} and "href" in attributes:
            self.loaded.append(attributes["href"])
        elif tag in {"audio", "iframe", "img", "script", "source", "video"} and "src" in attributes:
            self.loaded.append(attributes["src"])


def find_broken_links(site: Path) -> list[str]:
    """Each link that leads nowhere, and each file that would be loaded from another host, with the page that has it."""
    pages: dict[Path, _PageParser] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _PageParser()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken: list[str] = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it is shown at any address, so its links are those of the site's root
        name = path.relative_to(site).as_posix()
        broken += [f"{name}: {link} leads nowhere" for link in page.links if not _leads_somewhere(link, path, pages)]
        for link in page.loaded:
            if urlsplit(link).netloc:
                broken.append(f"{name}: {link} is loaded from another host")
            elif not _leads_somewhere(link, path, pages):
                broken.append(f"{name}: {link} is not there")
    return broken


def _leads_somewhere(link: str, path: Path, pages: dict[Path, _PageParser]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # other hosts are not asked
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if target not in pages:
        return target.is_file()
    return parts.fragment in {"", *pages[target].ids} or unquote(parts.fragment) in pages[target].ids


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build if a link of the built site is broken (an event of MkDocs); `make site-serve` only warns."""
    from mkdocs.exceptions import PluginError

    if broken := find_broken_links(Path(config.site_dir).resolve()):
        message = "the built site has broken links\n" + "\n".join(broken)
        if config.strict:
            raise PluginError(message)
        logging.getLogger("mkdocs.site_links").warning(message)
