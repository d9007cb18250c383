"""The packages of npm: each script is a client that checks what it hears."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from two_servers import MODEL

NODE: Final = shutil.which("node")
HERE: Final = Path(__file__).parent
SCRIPTS: Final = ("openai.mjs", "anthropic.mjs", "ai.mjs")

pytestmark = pytest.mark.skipif(NODE is None or shutil.which("npm") is None, reason="node and npm are not installed")


@pytest.fixture(scope="session")
def packages() -> Path:
    """Where the packages lie: beside the environment's own, made anew when package.json changes."""
    folder, wanted = Path(sys.prefix) / "npm", (HERE / "package.json").read_text(encoding="utf-8")
    made = folder / "complete.json"
    if not made.exists() or made.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(HERE / "package.json", folder)
        command = ["npm", "install", "--no-fund", "--no-audit", "--silent"]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
        made.write_text(wanted, encoding="utf-8")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
async def test_script(packages: Path, url: str, script: str) -> None:
    """It ends well; what it missed is what it printed."""
    shutil.copy(HERE / script, packages)  # from there its imports are found
    process = await asyncio.create_subprocess_exec(
        str(NODE), script, url, MODEL, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(120):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
