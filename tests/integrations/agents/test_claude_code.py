"""Claude Code through `llm-spec serve`, before a chat server with the strictest rules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import DONE, Rig, make_prompt, open_rig

FLAGS = ("--dangerously-skip-permissions", "--output-format", "text")
WRITE = ("Bash", {"command": "echo hi > out.txt && cat out.txt", "description": "Write a file"})
COUNT = ("Bash", {"command": "wc -c out.txt", "description": "Count"})


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with open_rig(tmp_path) as rig:
        configure(rig)
        yield rig


def configure(rig: Rig) -> None:
    rig.environment = {
        "ANTHROPIC_BASE_URL": rig.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": "my-model",
        "ANTHROPIC_SMALL_FAST_MODEL": "my-model",
        "CLAUDE_CONFIG_DIR": str(rig.home / "claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # it may run as root, too
    }


def ask(rig: Rig, prompt: str, *arguments: str) -> str:
    printed = rig.run("claude", "-p", prompt, *arguments, *FLAGS)
    assert DONE in printed, printed[-4000:]
    return printed


def list_main_requests(rig: Rig) -> list[dict]:
    """Those of the conversation: it also asks for titles."""
    return [body for body in rig.list_requests() if body.get("tools")]


def test_calls_reasoning_and_a_continued_session(rig: Rig) -> None:
    """Over ten turns each request begins with the one before it, so that a server's prefix cache holds."""
    ask(rig, make_prompt(WRITE, COUNT))
    assert rig.read_file("out.txt") == "hi\n"
    for _ in range(9):
        ask(rig, make_prompt(COUNT), "-c")
    requests = list_main_requests(rig)
    assert len(requests) == 3 + 9 * 2
    reasoning = [m["reasoning_content"] for m in requests[-1]["messages"] if m.get("tool_calls")]
    assert reasoning == ["Now comes step 0.", "Now comes step 1.", *["Now comes step 0."] * 9]
    for before, after in itertools.pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert "x-anthropic-billing-header" not in json.dumps(requests)


def test_parallel_calls_are_one_turn(rig: Rig) -> None:
    ask(rig, make_prompt((*WRITE, *COUNT)))
    messages = list_main_requests(rig)[-1]["messages"]
    assert [len(message["tool_calls"]) for message in messages if message.get("tool_calls")] == [2]


@pytest.mark.parametrize("sees_images", [True, False])
def test_an_image_in_a_result(tmp_path: Path, sees_images: bool) -> None:
    """The session goes on, whether the model sees it or is told that there was one."""
    with open_rig(tmp_path, model_settings={"images": sees_images}) as rig:
        configure(rig)
        picture = str(rig.work / "picture.png")
        ask(rig, make_prompt(("Read", {"file_path": picture})))
        ask(rig, make_prompt(COUNT), "-c")
        first = list_main_requests(rig)[1]["messages"]
        tool = next(i for i, message in enumerate(first) if message["role"] == "tool")
        assert ("image_url" in json.dumps(first[tool + 1 :])) == sees_images
        assert ("image/png" in str(first[tool]["content"])) == (not sees_images)
