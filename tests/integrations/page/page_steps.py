"""Steps that the tests of the page take."""

from __future__ import annotations

from playwright.async_api import Page, expect

__all__ = ["first_line", "number_in", "open_page", "reply", "run", "text_of"]


async def open_page(page: Page, url: str) -> None:
    await page.goto(url)
    await expect(page.get_by_label("Model").locator("option").first).to_be_attached()


async def run(page: Page, url: str, model: str | None = None, *, until: str | None = "Done:") -> None:
    """Opens the page, asks the model, and waits for the status."""
    await open_page(page, url)
    if model is not None:
        await page.get_by_label("Model").select_option(model)
    await page.get_by_label("Prompt", exact=True).fill("import heapq\n\ndef push(items, item):\n")
    await page.get_by_role("button", name="Run", exact=True).click()
    if until is not None:
        await expect(page.get_by_role("status")).to_contain_text(until)


async def reply(page: Page, text: str) -> None:
    """Continues the conversation, and waits for its next answer."""
    num_turns = await page.locator("#turns li").count()
    await page.get_by_label("Reply").fill(text)
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("#turns li")).to_have_count(num_turns + 1)


async def text_of(page: Page, lane: str = "with the draft") -> str:
    return await page.get_by_role("group", name=f"Text {lane}").evaluate("(group) => group.textContent")


async def first_line(page: Page, figure: str) -> str:
    return (await page.locator(f"#{figure}").inner_text()).splitlines()[0]


async def number_in(page: Page, figure: str) -> float:
    return float((await first_line(page, figure)).split()[0])
