"""A browser for the page, and a server for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from .browser import CHROMIUM, Seen
from .scripted_server import ScriptedServer, serve_scripts

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page


@pytest_asyncio.fixture(loop_scope="module")
async def scripted() -> AsyncIterator[ScriptedServer]:
    """A server that plays a script for each model."""
    async with serve_scripts() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def real() -> AsyncIterator[str]:
    """The server itself, with the built-in pair."""
    from llm_spec.server import Server, ServerConfig  # what collects all tests may not have what it needs

    async with Server(ServerConfig.builtin(port=0)) as server:
        yield f"{server.url}/"


@pytest.fixture(params=["recorded", "real"])
def page_server(request: pytest.FixtureRequest) -> str:
    """The base URL of a server with one pair: that plays recorded answers, and that of `llm-spec serve`."""
    if request.param == "recorded":
        return request.getfixturevalue("scripted").url
    url: str = request.getfixturevalue("real")
    return url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A real browser without a window; the pages of one know nothing of each other."""
    if CHROMIUM is None:
        pytest.skip("no chromium found (apt-get install chromium, or set CHROMIUM)")
    from playwright.async_api import async_playwright, expect  # what collects all tests may not have it

    expect.set_options(timeout=30_000)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, seen: Seen) -> AsyncIterator[Page]:
    """An empty page that notes what it does, and replays nothing unasked."""
    page = await browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page.set_default_timeout(30_000)
    page.on("console", lambda told: seen.console.append(told.text) if told.type in {"warning", "error"} else None)
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.on("request", lambda request: seen.urls.append(request.url))
    yield page
    await page.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()
