"""Pictures of the page that `llm-spec serve` shows, for the README: docs/page-light.png and docs/page-dark.png.

    pip install -r tests/integrations/page/requirements.txt && python tools/screenshot.py [URL]

Without a URL the recorded run of the built-in pair is shown, with the figures measured when it was recorded. The fonts
are those of the machine: Inter and JetBrains Mono where they are installed.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from playwright.async_api import Browser, async_playwright

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integrations" / "page"))

from browser import CHROMIUM  # noqa: E402 - found by the line above
from scripted_server import serve_scripts  # noqa: E402 - as above

_SIZE: Final = {"width": 1280, "height": 800}


@asynccontextmanager
async def _page_url(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    async with serve_scripts() as server:
        yield server.url


async def _picture(browser: Browser, url: str, scheme: str) -> None:
    context = await browser.new_context(viewport=_SIZE, color_scheme=scheme, reduced_motion="reduce")
    page = await context.new_page()
    await page.goto(url)
    await page.locator("#model option").first.wait_for(state="attached")
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_label("Seed").fill("1")
    await page.get_by_role("button", name="Run", exact=True).click()
    await page.get_by_text("Done:").wait_for()
    await page.get_by_role("button", name="Run plain beside").click()
    await page.locator("#verdict").wait_for()
    await page.evaluate("document.querySelectorAll('.text').forEach((text) => { text.scrollTop = 0; })")
    path = ROOT / "docs" / f"page-{scheme}.png"
    await page.screenshot(path=path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    await context.close()


async def main() -> None:
    (ROOT / "docs").mkdir(exist_ok=True)
    async with async_playwright() as playwright, _page_url(sys.argv[1] if len(sys.argv) > 1 else None) as url:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            await _picture(browser, url, scheme)


if __name__ == "__main__":
    asyncio.run(main())
