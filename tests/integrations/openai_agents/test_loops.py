"""Models on several event loops, and in forked processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from support.wire import text_chunks


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b"".join(text_chunks("hello"))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the base class's name


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


# In processes of their own: the SDK leaves the loop of `run_sync` open, for the next one.
LOOPS = """
import asyncio, sys
from agents import Agent, RunConfig, Runner
from llm_spec import SpeculativeDecoder
from llm_spec.integrations.openai_agents import SpeculativeModel

decoder = SpeculativeDecoder(target=sys.argv[1], draft=None) if sys.argv[2] == "given" else None
model = SpeculativeModel(decoder or sys.argv[1])
agent = Agent(name="a", model=model, model_settings={"max_tokens": 8})
options = {"run_config": RunConfig(tracing_disabled=True)}

async def run_streamed():
    streamed = Runner.run_streamed(agent, "def area(radius):", **options)
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output

texts = []
for _ in range(2):
    texts.append(Runner.run_sync(agent, "def area(radius):", **options).final_output)
    texts.append(asyncio.run(run_streamed()))
assert len(set(texts)) == 1 and texts[0], texts
asyncio.run(decoder.aclose() if decoder else model.close())
"""
FORK = """
import os, signal, sys
from agents import Agent, RunConfig, Runner
from llm_spec.integrations.openai_agents import SpeculativeModel

agent = Agent(name="a", model=SpeculativeModel(sys.argv[1]), model_settings={"max_tokens": 8})

def ask():
    return Runner.run_sync(agent, "def area(radius):", run_config=RunConfig(tracing_disabled=True)).final_output

text = ask()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if ask() == text else 1)
_, status = os.waitpid(child, 0)
assert ask() == text
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run_program(program: str, kind: str, url: str, *arguments: str) -> None:
    target = "builtin:target" if kind == "builtin" else f"generic:m@{url}"
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, target, *arguments]
    env = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("is_given", ["named", "given"])
@pytest.mark.parametrize("kind", ["builtin", "server"])
def test_one_model_on_several_loops(kind: str, is_given: str, url: str) -> None:
    """`run_sync` and `asyncio.run` by turns, on a model that was named and on a decoder that was given."""
    run_program(LOOPS, kind, url, is_given)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("kind", ["builtin", "server"])
def test_a_forked_child_answers(kind: str, url: str) -> None:
    """After a run in the parent, a run in its child gives the same, and so does another in the parent."""
    run_program(FORK, kind, url)
