"""The table of fields that a request may carry, as Markdown: what docs/request-fields.md shows.

python tools/list_request_fields.py            # print the table
python tools/list_request_fields.py --write    # put it into the page
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from llm_spec.contract.fields import TABLE, RequestFieldGroup

PAGE: Final = Path(__file__).parent.parent / "docs" / "request-fields.md"
HEAD: Final = "| fields | of | at a server | in this process | why, or how |\n| --- | --- | --- | --- | --- |\n"


def build_table() -> str:
    """The rows, one a line."""
    return HEAD + "".join(_build_line(row) for row in TABLE)


def _build_line(row: RequestFieldGroup) -> str:
    names = ", ".join(f"`{name}`" for name in row.names.split())
    sent = "" if row.is_passed or row.local == "own" or row.is_limit else "; not sent on"
    local = {"own": "kept", "left_out": "left out"}.get(row.local, row.local)
    return f"| {names} | {row.apis.replace(' ', ', ')} | {row.server}{sent} | {local} | {row.note} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/request-fields.md")
    if not parser.parse_args().write:
        print(build_table(), end="")
        return
    text = PAGE.read_text(encoding="utf-8")
    before = text[: text.index("| fields |")]
    PAGE.write_text(before + build_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
