"""Two `llm-spec serve` as real processes: one answers by rules, the other over it, as a server behind a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["MODEL", "two_servers"]

MODEL: Final = "fast"  # of both servers, and what any other name stands for
_TELLS: Final = "llm-spec serves at "


@contextmanager
def two_servers(folder: Path) -> Generator[str]:
    """The address of the second, whose target is the first; their configs and errors are kept in `folder`."""
    with _server(folder / "rules", "rules:any") as behind:
        with _server(folder / "over", f"generic:{MODEL}@{behind}/v1") as url:
            yield url


@contextmanager
def _server(folder: Path, target: str) -> Generator[str]:
    folder.mkdir()
    config, errors = folder / "serve.toml", folder / "errors.txt"
    config.write_text(f'[server]\ndefault_model = "{MODEL}"\n[models.{MODEL}]\ntarget = "{target}"\n', encoding="utf-8")
    program = Path(sys.executable).with_name("llm-spec")
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [program, "serve", "--config", config, "--port", "0"], stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            told = process.stdout.readline() if process.stdout is not None else ""
            if not told.startswith(_TELLS):
                process.wait(10)
                raise RuntimeError(f"no server: {told}{errors.read_text(encoding='utf-8')}")
            yield told.removeprefix(_TELLS).strip()
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()
