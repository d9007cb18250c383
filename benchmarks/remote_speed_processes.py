"""Processes of `remote_speed.py`: servers and clients that end with their standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from remote_speed_client import Answer, ClientSetup

SERVER: Final = Path(__file__).with_name("double_server.py")
CLIENT: Final = Path(__file__).with_name("remote_speed_client.py")


@contextmanager
def run_process(command: Sequence[str]) -> Generator[subprocess.Popen[str]]:
    """A program that ends with its standard input."""
    process = subprocess.Popen(  # noqa: S603 - a program of this folder
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exchange(process: subprocess.Popen[str], line: Any) -> Any:
    """One line of JSON to a process, and the one that it answers."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return read_line(process)


def read_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended without an answer")
    return json.loads(line)


@contextmanager
def start_server(*, answer_tokens: int, **options: float) -> Generator[str]:
    """A double; its address, which ends in /v1."""
    command = [str(SERVER), "--end-with-stdin", f"--answer-tokens={answer_tokens}"]
    flags = {name.replace("_", "-"): value for name, value in options.items()}
    command += [
        (f"--{name}" if value else f"--no-{name}") if isinstance(value, bool) else f"--{name}={value}"
        for name, value in flags.items()
    ]
    with run_process(command) as process:
        yield read_line(process)["url"]


@contextmanager
def start_client(setup: ClientSetup) -> Generator[subprocess.Popen[str]]:
    with run_process([str(CLIENT), json.dumps(asdict(setup))]) as process:
        yield process


def read_stats(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/stats", timeout=10) as answer:  # noqa: S310 - our own
        return json.load(answer)


def ask(client: subprocess.Popen[str], url: str, prompt: str) -> Answer:
    """One answer of a client, with what the server counted meanwhile."""
    before = read_stats(url)
    answer = Answer(**exchange(client, prompt))
    counted = {name: value - before[name] for name, value in read_stats(url).items() if not name.startswith("most")}
    return replace(answer, server=counted)
