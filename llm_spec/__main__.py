"""`python -m llm_spec` is the command `llm-spec`."""

from __future__ import annotations

import sys

from llm_spec_cli import main

if __name__ == "__main__":
    sys.exit(main())
