"""A strict chat server, `llm-spec serve` in front of it, and a folder in which an agent works."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

DONE: Final = "Done: ünïcode ✓"  # the end of the upstream's text
HERE: Final = Path(__file__).parent
PROGRAMS: Final = Path(sys.prefix) / "npm" / "node_modules" / ".bin"  # where tools/integrations/run.sh puts them
STRICT: Final = ("system", "developer", "alternate", "reasoning")
_TIMEOUT_S: Final = 180.0  # of one turn of an agent


@dataclass
class Rig:
    """`url`: the server's, without /v1. Whatever an agent keeps is in `home`."""

    url: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self, program: str, *arguments: str) -> str:
        """What an agent printed; fails where it ends badly."""
        status, printed = self.try_to_run(program, *arguments)
        assert status == 0, printed[-4000:]
        return printed

    def try_to_run(self, program: str, *arguments: str) -> tuple[int, str]:
        path = PROGRAMS / program
        if not path.exists():
            pytest.skip(f"{program} is not installed; run tools/integrations/run.sh agents, with npm")
        given = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "OPENAI"))}
        # its own tests may run inside an agent, whose settings are not this one's
        given = {name: value for name, value in given.items() if not name.startswith(("CLAUDE", "CODEX"))}
        done = subprocess.run(
            [str(path), *arguments],
            cwd=self.work,
            env={**given, "HOME": str(self.home), "PWD": str(self.work), **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return done.returncode, f"{done.stdout}\n{done.stderr}"

    def list_requests(self) -> list[dict[str, Any]]:
        """The bodies that came upstream."""
        log = self.folder / "log.jsonl"
        return [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []

    def list_tool_results(self) -> list[str]:
        """Those in the longest request."""
        longest = max(self.list_requests(), key=lambda body: len(body["messages"]))
        return [str(message["content"]) for message in longest["messages"] if message["role"] == "tool"]

    def read_file(self, name: str) -> str | None:
        path = self.work / name
        return path.read_text("utf-8") if path.exists() else None


def make_prompt(*turns: Sequence[Any], words: str = "THINK") -> str:
    """What the upstream takes apart: turns of calls, each `(end of a name, arguments, …)`."""
    return f"PROMPT {words} SCRIPT {json.dumps(turns)}" if turns else f"PROMPT {words}"


@contextmanager
def open_rig(
    folder: Path, *, rules: Sequence[str] = STRICT, model_settings: Mapping[str, object] | None = None
) -> Generator[Rig]:
    """The upstream keeps to `rules`; `model_settings` are those of the served model."""
    for name in ("home", "work"):
        (folder / name).mkdir(parents=True)
    (folder / "work" / "picture.png").write_bytes(make_png())
    with ExitStack() as stack:
        port = _start(stack, folder, sys.executable, HERE / "upstream.py", folder / "log.jsonl", *rules)
        config = folder / "serve.toml"
        provider = {"type": "deepseek", "base_url": f"http://127.0.0.1:{port}/v1", "api_key": "some-key-of-a-test"}
        tables = {
            "server": {"default_model": "m"},
            "providers.upstream": provider,
            "models.m": {"target": "upstream:m", **(model_settings or {})},
        }
        config.write_text("".join(f"[{name}]\n{_to_toml(table)}" for name, table in tables.items()), "utf-8")
        serve = Path(sys.executable).with_name("llm-spec")
        told = _start(stack, folder, serve, "serve", "--config", config, "--port", "0")
        yield Rig(told.rpartition(" ")[2], folder)


def make_png() -> bytes:
    """A picture of 2 x 2 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + colour * 2 for colour in (b"\xff\0\0", b"\0\xff\0"))
    header = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _to_toml(table: Mapping[str, object]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())


def _start(stack: ExitStack, folder: Path, *command: str | Path) -> str:
    """Start a process that ends with the stack; its first line."""
    errors = stack.enter_context((folder / "errors.txt").open("ab"))
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True))
    stack.callback(_stop, process)
    first = process.stdout.readline().strip() if process.stdout is not None else ""
    assert first, (folder / "errors.txt").read_text("utf-8")
    return first


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
