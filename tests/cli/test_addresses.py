"""What the commands print of addresses: never a password, and never a guess where a prompt should go."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_spec.cli.main import main

TARGET = "generic:m@http://svc:s3cr3t-pw@127.0.0.1:9/v1"
QUERY = "generic:m@http://127.0.0.1:9/v1?key=s3cr3t-pw"
CONFIG = """
[providers.named]
type = "generic"
base_url = "{address}"

[models.m]
target = "{target}"
draft = "{draft}"
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hi", "--target", TARGET, "--no-speculation"],
        ["run", "hi", "--target", TARGET, "--draft", TARGET],
        ["run", "hi", "--target", f"{TARGET}#x"],
        ["run", "hi", "--target", TARGET.replace("pw@", "pw/@")],
        ["run", "hi", "--target", TARGET.replace("generic", "nosuch")],
        ["run", "hi", "--target", QUERY, "--no-speculation"],
        ["run", "hi", "--target", QUERY.replace("generic", "nosuch")],
        ["run", "hi", "--target", QUERY.replace("generic:", "generic/")],
        ["plan", "--target", QUERY, "--draft", f"lookup+{QUERY}"],
        ["bench", "--target", QUERY, "--prompt", "hi", "--repeat", "1", "--warmup", "0"],
        ["plan", "--target", TARGET, "--draft", f"lookup+{TARGET}"],
        ["plan", "--target", TARGET, "--draft", "lookup", "--measure", "hi"],
        ["bench", "--target", TARGET, "--prompt", "hi", "--repeat", "1", "--warmup", "0"],
        ["bench", "--target", TARGET, "--prompt", "hi", "--contender", TARGET],
        ["bench", "--target", TARGET, "--prompt", "hi", "--price", f"{TARGET}=1:2", "--price", f"{TARGET}=1:2"],
    ],
    ids=" ".join,
)
def test_no_command_prints_a_password(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, printed = run(capsys, *arguments)
    assert code == (0 if arguments[0] == "plan" and "--measure" not in arguments else 2)
    assert "s3cr3t" not in printed
    assert "***" in printed or "write it as" in printed or "@http" not in printed


@pytest.mark.parametrize(
    ("address", "target", "draft"),
    [
        ("http://svc:s3cr3t-pw@127.0.0.1:9/v1", "named:m", "lookup"),
        ("http://127.0.0.1:9/v1", TARGET, "lookup"),
        ("http://127.0.0.1:9/v1", "builtin:target", TARGET),
        ("http://127.0.0.1:9/v1", QUERY, f"lookup+{QUERY}"),
        ("http://127.0.0.1:9/v1?key=s3cr3t-pw", "named:m", "lookup"),
        ("http://127.0.0.1:9/v1", TARGET, f"lookup+{TARGET}"),
        ("http://svc:s3cr3t-pw@127.0.0.1:9/v1#x", "named:m", "lookup"),
        ("svc:s3cr3t-pw@127.0.0.1:9/v1", "named:m", "lookup"),
        ("http://127.0.0.1:9/v1", "generic:m@svc:s3cr3t-pw@127.0.0.1:9/v1", "lookup"),
    ],
)
def test_the_check_of_a_config_prints_no_password(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, address: str, target: str, draft: str
) -> None:
    path = tmp_path / "llm-spec.toml"
    path.write_text(CONFIG.format(address=address, target=target, draft=draft))
    code, printed = run(capsys, "serve", "--config", str(path), "--check")
    assert code == 2
    assert "models.m" in printed
    assert "s3cr3t" not in printed


@pytest.mark.parametrize("command", [["run", "hi"], ["plan", "--draft", "lookup"], ["bench", "--prompt", "hi"]])
def test_an_address_without_a_scheme(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Every command says how to write it; the vendor gets nothing."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-any")
    code, printed = run(capsys, *command, "--target", "openai:m@gpubox:8000/v1")
    assert code == 2
    assert "write @http://gpubox:8000/v1 or @https://gpubox:8000/v1" in printed
