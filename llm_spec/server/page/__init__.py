"""The page at `/`: one document, put together from its parts, which loads nothing."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

__all__ = ["build_page"]

_STYLE_PATTERN: Final = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT_PATTERN: Final = re.compile(r'<script([^>]*) src="([\w.]+)">(?=</script>)')


def build_page() -> str:
    """The document, with its style sheet, its scripts and the recording in it."""
    page = _read_part("page.html")
    page = _STYLE_PATTERN.sub(lambda found: f"<style>\n{_read_part(found[1])}</style>", page)
    return _SCRIPT_PATTERN.sub(lambda found: f"<script{found[1]}>\n{_read_part(found[2])}", page)


def _read_part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
