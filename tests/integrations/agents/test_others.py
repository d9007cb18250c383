"""qwen-code and opencode, which speak chat completions."""

from __future__ import annotations

import json
from pathlib import Path

from rig import DONE, make_prompt, open_rig


def test_qwen_code(tmp_path: Path) -> None:
    with open_rig(tmp_path, rules=("system", "alternate")) as rig:
        rig.environment = {
            "OPENAI_API_KEY": "any",
            "OPENAI_BASE_URL": f"{rig.url}/v1",
            "OPENAI_MODEL": "my-model",
            "QWEN_CODE_DISABLE_TELEMETRY": "1",
        }
        call = {"command": "echo hi > out.txt", "description": "Write a file", "is_background": False}
        prompt = make_prompt(("run_shell_command", call), words="")
        printed = rig.run("qwen", "--auth-type", "openai", "--yolo", "-p", prompt)
        assert DONE in printed, printed[-4000:]
        assert rig.read_file("out.txt") == "hi\n"


def test_opencode(tmp_path: Path) -> None:
    with open_rig(tmp_path, rules=("system",)) as rig:
        options = {"baseURL": f"{rig.url}/v1", "apiKey": "any"}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "spec",
            "options": options,
            "models": {"my-model": {"name": "my-model"}},
        }
        config = {"provider": {"spec": provider}, "model": "spec/my-model", "permission": "allow", "autoupdate": False}
        rig.environment = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "XDG_DATA_HOME": str(rig.home / "data"),
            "XDG_CONFIG_HOME": str(rig.home / "config"),
        }
        call = {"command": "echo hi > out.txt", "description": "Write a file"}
        printed = rig.run("opencode", "run", "--model", "spec/my-model", make_prompt(("bash", call), words=""))
        assert DONE in printed, printed[-4000:]
        assert rig.read_file("out.txt") == "hi\n"
