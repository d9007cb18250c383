"""Real servers as processes of their own on 127.0.0.1: where they are installed, how they start, and that they end."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from make_pair import find_pair

__all__ = ["INSTALL", "MODELS", "serve_llama", "serve_vllm", "write_gguf"]

MODELS = find_pair()
INSTALL = "tools/peers/install.sh"

_GUARD = Path(__file__).with_name("guard.py")
_TO_GGUF = Path(__file__).parents[2] / "tools" / "peers" / "to_gguf.py"
_NUM_SLOTS = 12  # answers at once; more of them wait
_CONTEXT = 2048  # tokens of prompt and answer, on both servers
_TAIL = 3000  # characters of a server's output to show when it does not become ready


@contextmanager
def serve_vllm(model: Path, name: str, folder: Path, *options: str) -> Iterator[str]:
    """The address, ending in /v1, of a vLLM for a Hugging Face folder; its output goes to a file in `folder`.

    `options`: of `vllm serve`, beside those that all have.
    """
    program = find_installed("vllm", "bin/vllm")
    port = _free_port()
    command = [
        *(str(program), "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(_CONTEXT), "--max-num-seqs", str(_NUM_SLOTS)),
        *("--block-size", "32", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager"),
        *options,
    ]
    environment = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = program.parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    with _serving(command, port, folder / f"vllm-{name}.log", environment, patience_s=180.0) as url:
        yield url


@contextmanager
def serve_llama(model: Path, name: str, folder: Path) -> Iterator[str]:
    """The address, ending in /v1, of a llama-server for a GGUF file; its output goes to a file in `folder`.

    Keys and values are kept in float32: in its default float16 its greedy answers leave those of other servers. One
    thread: two wait for each other spinning, and with both cores busy a token took them 3 to 56 times as long.
    """
    program = find_installed("llama", "bin/llama-server")
    port = _free_port()
    command = [
        *(str(program), "--model", str(model), "--alias", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--ctx-size", str(_CONTEXT * _NUM_SLOTS), "--parallel", str(_NUM_SLOTS), "--threads", "1"),
        *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"),
        *("--jinja", "--metrics", "--offline", "--no-warmup"),
    ]
    with _serving(command, port, folder / f"llama-{name}.log", {}, patience_s=30.0) as url:
        yield url


def write_gguf(model: Path, folder: Path) -> Path:
    """The GGUF file of a Hugging Face folder."""
    destination = folder / f"{model.name}.gguf"
    subprocess.run([sys.executable, _TO_GGUF, model, destination], check=True, capture_output=True)
    return destination


def find_installed(peer: str, name: str) -> Path:
    """An installed server's program, or another of its files; without the server the test is skipped."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("LLM_SPEC_PEERS") or cache / "llm_spec" / "peers") / peer
    if not (folder / ".complete").exists():
        pytest.skip(f"peers: {peer} is not installed; run {INSTALL}")
    return folder / name


@contextmanager
def _serving(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], patience_s: float
) -> Iterator[str]:
    """Start a server under its guard; leaving closes the guard's input, which ends the server, and waits for that."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, str(_GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # an interrupt from the keyboard is for the test run
        ) as guard,
    ):
        _wait_until_ready(guard, port, log, patience_s)
        yield f"http://127.0.0.1:{port}/v1"


def _wait_until_ready(guard: subprocess.Popen[bytes], port: int, log: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not _is_healthy(port):
        ended = guard.poll() is not None
        if ended or time.monotonic() > deadline:
            what = "ended before it was ready" if ended else f"was not ready after {patience_s:.0f} s"
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            raise RuntimeError(f"the server {what}; its output in {log} ends with:\n{tail}")
        time.sleep(0.1)


def _is_healthy(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
