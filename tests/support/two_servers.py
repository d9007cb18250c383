"""Two `llm-spec serve` as real processes: one answers by rules, the other over it, as a server behind a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

__all__ = ["MODEL", "no_keys", "two_servers", "url"]

MODEL: Final = "fast"  # of both servers, and what any other name stands for
_TELLS: Final = "llm-spec serves at "


@contextmanager
def two_servers(folder: Path) -> Generator[str]:
    """The address of the second, whose target is the first; their configs and errors are kept in `folder`."""
    with (
        _server(folder / "rules", "rules:any") as behind,
        _server(folder / "over", f"generic:{MODEL}@{behind}/v1") as address,
    ):
        yield address


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the two, without /v1."""
    with two_servers(tmp_path_factory.mktemp("servers")) as address:
        yield address


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would ask another server than the one given fails there."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none-such")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def _server(folder: Path, target: str) -> Generator[str]:
    folder.mkdir()
    config, errors = folder / "serve.toml", folder / "errors.txt"
    config.write_text(f'[server]\ndefault_model = "{MODEL}"\n[models.{MODEL}]\ntarget = "{target}"\n', encoding="utf-8")
    command = [Path(sys.executable).with_name("llm-spec"), "serve", "--config", config, "--port", "0"]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            told = "" if process.stdout is None else process.stdout.readline()
            if not told.startswith(_TELLS):
                raise RuntimeError(f"no server: {told}{errors.read_text(encoding='utf-8')}")
            yield told.removeprefix(_TELLS).strip()
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()
