"""Codex through `llm-spec serve`, with no setting but its provider, before a server with the strictest rules."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import DONE, HERE, Rig, make_prompt, open_rig

FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
DEMO = f'[mcp_servers.demo]\ncommand = "{sys.executable}"\nargs = ["{HERE / "mcp_server.py"}"]\n'
WRITE = ("exec_command", {"cmd": "echo hi > out.txt && cat out.txt"})
COUNT = ("exec_command", {"cmd": "wc -c out.txt"})
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+ünï patched ✓\n*** End Patch\n"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with open_rig(tmp_path) as rig:
        configure(rig)
        yield rig


def configure(rig: Rig, *, model: str = "my-model", more: str = "", top: str = "") -> None:
    """A model of that name at the server; `more` tables and `top` keys of the config."""
    rig.environment = {"CODEX_HOME": str(rig.home), "SPEC_KEY": "any", "RUST_LOG": "error"}
    provider = f'name = "spec"\nbase_url = "{rig.url}/v1"\nwire_api = "responses"\nenv_key = "SPEC_KEY"\n'
    config = f'model = "{model}"\nmodel_provider = "spec"\n{top}\n[model_providers.spec]\n{provider}\n{more}'
    (rig.home / "config.toml").write_text(config, "utf-8")


def ask(rig: Rig, prompt: str, *arguments: str) -> str:
    printed = rig.run("codex", "exec", *arguments, *FLAGS, prompt)
    assert DONE in printed, printed[-4000:]
    return printed


def resume(rig: Rig, prompt: str) -> str:
    printed = rig.run("codex", "exec", "resume", "--last", *FLAGS, prompt)
    assert DONE in printed, printed[-4000:]
    return printed


def test_calls_reasoning_and_a_resumed_session(rig: Rig) -> None:
    """Over ten turns each request begins with the one before it, so that a server's prefix cache holds."""
    ask(rig, make_prompt(WRITE, COUNT))
    assert rig.read_file("out.txt") == "hi\n"
    for _ in range(9):
        resume(rig, make_prompt(COUNT))
    requests = rig.list_requests()
    assert len(requests) == 3 + 9 * 2
    reasoning = [m["reasoning_content"] for m in requests[-1]["messages"] if m.get("tool_calls")]
    assert reasoning == ["Now comes step 0.", "Now comes step 1.", *["Now comes step 0."] * 9]
    for before, after in itertools.pairwise(requests):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_parallel_calls_are_one_turn(rig: Rig) -> None:
    ask(rig, make_prompt((*WRITE, *COUNT)))
    calls = [len(message["tool_calls"]) for message in rig.list_requests()[-1]["messages"] if message.get("tool_calls")]
    assert calls == [2]


def test_a_tool_of_an_mcp_server(rig: Rig) -> None:
    configure(rig, more=DEMO)
    ask(rig, make_prompt(("greet", {"name": "Ann"})))
    assert "Hello, Ann, from afar." in rig.list_tool_results()[0]


def test_a_patch_by_the_custom_tool(rig: Rig) -> None:
    """Known models have `apply_patch`, whose input is a text."""
    configure(rig, model="gpt-5.5")
    ask(rig, make_prompt(("apply_patch", {"input": PATCH})))
    assert rig.read_file("patched.txt") == "ünï patched ✓\n"


def test_code_mode(rig: Rig) -> None:
    """The newest models write programs, which call the tools."""
    configure(rig, model="gpt-5.6-sol")
    programs = (
        'text(await tools.exec_command({cmd: "echo hi > out.txt && cat out.txt"}));',
        f"text(await tools.apply_patch({json.dumps(PATCH)}));",
    )
    ask(rig, make_prompt(*(("exec", {"input": program}) for program in programs)))
    assert (rig.read_file("out.txt"), rig.read_file("patched.txt")) == ("hi\n", "ünï patched ✓\n")


def test_a_sub_agent(rig: Rig) -> None:
    task = make_prompt(("exec_command", {"cmd": "echo sub > sub.txt"}))
    wait = {"targets": ["$ID"], "ids": ["$ID"], "timeout_ms": 30000}
    ask(
        rig,
        make_prompt(
            ("spawn_agent", {"message": task}), ("wait_agent", wait), ("close_agent", {"target": "$ID", "id": "$ID"})
        ),
    )
    assert rig.read_file("sub.txt") == "sub\n", rig.list_tool_results()
    assert DONE in rig.list_tool_results()[1]


@pytest.mark.parametrize("sees_images", [True, False])
def test_an_image_in_a_result(tmp_path: Path, sees_images: bool) -> None:
    """A model that sees gets it behind the results; one that does not is told that there was one."""
    with open_rig(tmp_path, model_settings={"images": sees_images}) as rig:
        configure(rig)
        ask(rig, make_prompt(("view_image", {"path": "picture.png"})))
        resume(rig, make_prompt(COUNT))
        first = rig.list_requests()[1]["messages"]
        if sees_images:
            assert first[-2]["role"] == "tool"
            assert any(part["type"] == "image_url" for part in first[-1]["content"])
        else:
            assert first[-1]["role"] == "tool"
            assert "image/png" in first[-1]["content"]


def test_an_image_of_the_user(rig: Rig) -> None:
    ask(rig, make_prompt(COUNT), "--image=picture.png")
    users = [message for message in rig.list_requests()[0]["messages"] if message["role"] == "user"]
    assert "image_url" in json.dumps(users[-1])


@pytest.mark.parametrize(
    ("refused", "told"), [("400 context_length_exceeded", "ran out of room"), ("429 insufficient_quota", "uota")]
)
def test_errors_are_told_by_their_codes(rig: Rig, refused: str, told: str) -> None:
    status, printed = rig.try_to_run("codex", "exec", *FLAGS, make_prompt(words=f"REFUSE {refused}"))
    assert status != 0
    assert told in printed, printed[-4000:]


def test_openai_s_own_provider_at_another_address(rig: Rig) -> None:
    """It tries a WebSocket first, and goes on at once without."""
    rig.environment = {"CODEX_HOME": str(rig.home), "CODEX_API_KEY": "sk-any", "OPENAI_API_KEY": "sk-any"}
    (rig.home / "config.toml").write_text('model = "gpt-5.5"\n', "utf-8")
    printed = ask(rig, make_prompt(WRITE), "-c", f'openai_base_url="{rig.url}/v1"')
    assert "econnecting" not in printed


def test_a_long_conversation_is_compacted(rig: Rig) -> None:
    configure(rig, top="model_auto_compact_token_limit = 3000")
    ask(rig, make_prompt(WRITE, COUNT, words="THINK BIG"))
    assert any(not body.get("tools") or "ummar" in json.dumps(body["messages"][-1]) for body in rig.list_requests())
