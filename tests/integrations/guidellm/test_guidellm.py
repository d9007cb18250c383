"""guidellm: a benchmark of the server ends without an error, and its counts are the server's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")

from support.two_servers import MODEL

PROMPTS = ["Good morning to all of you", "What is a server", "One two three"]


async def test_benchmark(url: str, tmp_path: Path) -> None:
    """Every prompt is answered, streamed, with the usage that the report is made of."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    options = {
        "backend": f"kind=openai_http,target={url},model={MODEL}",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={len(PROMPTS)}",
        "data": "kind=text_file,path=prompts.txt",
        "output": "kind=json,path=report.json",
    }
    command = [f"--{name}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("guidellm"),
        "run",
        *command,
        "--disable-console",
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(300):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    (benchmark,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (len(PROMPTS), 0)
    assert {one["output"].strip() for one in requests["successful"]} == {f"You said: {prompt}" for prompt in PROMPTS}
    assert all(one["output_tokens"] >= 5 for one in requests["successful"])
