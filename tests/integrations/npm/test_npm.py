"""The packages of npm: each script is a client that checks what it hears."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from support.two_servers import MODEL

NODE: Final = shutil.which("node")
HERE: Final = Path(__file__).parent
PACKAGES: Final = Path(sys.prefix) / "npm"  # where tools/integrations/run.sh puts them
SCRIPTS: Final = ("openai.mjs", "anthropic.mjs", "ai.mjs")

pytestmark = pytest.mark.skipif(
    NODE is None or not (PACKAGES / "node_modules").exists(), reason="run tools/integrations/run.sh npm, with Node.js"
)


@pytest.mark.parametrize("script", SCRIPTS)
async def test_script(url: str, script: str) -> None:
    """It ends well; what it missed is what it printed."""
    shutil.copy(HERE / script, PACKAGES)  # from there its imports are found
    process = await asyncio.create_subprocess_exec(
        str(NODE), script, url, MODEL, cwd=PACKAGES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(120):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
