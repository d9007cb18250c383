"""Pictures of the page that `llm-spec serve` shows, for the docs: light, dark, and on a phone.

    pip install -r tests/integrations/page/requirements.txt && python tools/screenshot.py [--run] [--to FOLDER] [URL]

They show the page as it is met, at the end of its recording. With `--run` they show the median of three races, run with
the built-in pair or with the first model of the server at URL. The fonts are those of the machine: Inter and JetBrains
Mono where they are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from playwright.async_api import Browser, Page, async_playwright

from llm_spec.server import Server, ServerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integrations" / "page"))

from browser import CHROMIUM  # noqa: E402 - found by the line above

_DESKTOP: Final = {"viewport": {"width": 1280, "height": 1010}}
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": _DESKTOP | {"color_scheme": "light"},
    "dark": _DESKTOP | {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


@asynccontextmanager
async def _serve_page(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    async with Server(ServerConfig.builtin(port=0)) as server:
        yield server.url


async def _run_races(page: Page) -> None:
    """Run twice, as the first finds cold caches, then race the second answer twice more: their median is shown."""
    for order in ("#run", "#run", "#again"):
        await page.locator(order).click()
        await page.locator("#run[aria-disabled=false]").wait_for()


async def _take_picture(browser: Browser, url: str, look: str, arguments: argparse.Namespace) -> None:
    context = await browser.new_context(**_LOOKS[look], reduced_motion="reduce")  # which replays nothing
    page = await context.new_page()
    await page.goto(url)
    await page.locator("#model option").first.wait_for(state="attached")
    if arguments.run:
        await _run_races(page)
    elif look == "phone":
        await page.locator("#race").evaluate("(card) => card.scrollIntoView()")
    path = arguments.to / f"page-{look}.png"
    await page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    await context.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="of a running server")
    parser.add_argument("--run", action="store_true", help="race three times")
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="folder (docs)")
    arguments = parser.parse_args()
    arguments.to.mkdir(exist_ok=True)
    async with async_playwright() as playwright, _serve_page(arguments.url) as url:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for look in _LOOKS:
            await _take_picture(browser, url, look, arguments)


if __name__ == "__main__":
    asyncio.run(main())
