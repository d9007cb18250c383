"""What the page says if something is wrong, and what it does with keys and budgets."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.async_api import Page, expect

from .page_steps import open_page, run, text_of
from .scripted_server import ScriptedServer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all of them


@pytest.mark.parametrize(
    ("model", "state", "line"),
    [
        (
            "refused",
            "Refused.",
            "The server cannot answer now: Busy, <b>wait</b> (HTTP 429). Try again in 3 s.",
        ),
        ("no-json", "Failed.", "The server failed: Bad Gateway (HTTP 502)"),
        (
            "bad-request",
            "Refused.",
            "The server refused the request: temperature is -1 (HTTP 400)",
        ),
        (
            "forbidden",
            "Refused.",
            "The server does not allow this: not from this origin (HTTP 403)",
        ),
        ("spent", "Refused.", re.compile("^The budget of this API key is used up")),
        ("held", "Refused.", re.compile("^Other answers hold what is left of this key\u2019s budget. Run again")),
        ("broken", "Failed.", "The answer failed: target scripted:target: out of <memory>"),
        ("cut", "No connection.", "The connection closed before the answer was complete."),
        ("torn", "No connection.", "The connection broke before the answer was complete."),
    ],
)
async def test_error_is_one_clear_line(
    page: Page, scripted: ScriptedServer, model: str, state: str, line: str | re.Pattern[str]
) -> None:
    """Before the stream and within it: what happened, what came before it, and a page that works on."""
    await run(page, scripted.url, model, until=state)
    await expect(page.locator("#race").get_by_role("alert")).to_have_text(line)
    await expect(page.locator("#headline")).to_be_hidden()
    assert await text_of(page) == ("Half an " if model in {"broken", "cut", "torn"} else "")
    await expect(page.locator("#timeline-note")).to_have_text("No round has ended.")
    await expect(page.locator("#pace")).not_to_contain_text("price")
    await expect(page.locator("#conversation")).to_be_hidden()
    await page.get_by_label("Model").select_option("builtin")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_a_failed_run_has_no_figures_and_says_so(page: Page, scripted: ScriptedServer) -> None:
    """Nothing stands for a price that was never asked for, nor for rounds that will not come."""
    await run(page, scripted.url, "no-json", until="Failed.")
    told = await page.locator("#figures dd").all_inner_texts()
    assert [text.split("\n") for text in told] == [
        ["\u2013", "nothing drafted"],
        ["\u2013", "no rounds"],
        ["\u2013", "no text"],
        ["\u2013", "no tokens"],
        ["\u2013", "not known"],
    ]
    lanes = await page.locator(".text").evaluate_all("(all) => all.map((node) => node.dataset.empty)")
    assert lanes == ["Nothing came.", "Did not run."]


async def test_a_target_alone_that_fails_keeps_the_answer(page: Page, scripted: ScriptedServer) -> None:
    """What the draft's side answered stays, with its time, and the race can be completed."""
    plays = scripted.scripts["behind"]
    scripted.scripts["behind"] = lambda asked: (
        scripted.scripts["broken"](asked) if asked.strategy == "plain" else plays(asked)
    )
    await run(page, scripted.url, "behind", until="Failed.")
    await expect(page.locator("#headline")).to_have_text("1.50 s with the draft")
    await expect(page.locator("#basis")).to_contain_text("The target alone has not answered")
    await expect(page.get_by_role("alert")).to_contain_text("out of <memory>")
    assert await text_of(page) == "One two three."
    scripted.scripts["behind"] = plays
    await page.get_by_role("button", name="Race this answer", exact=True).click()
    await expect(page.locator("#headline")).to_have_text("1.50x later in one run, same text")
    assert [asked.strategy for asked in scripted.asked] == ["auto", "plain", "plain"]


async def test_stopped_before_anything_came_is_said(page: Page, scripted: ScriptedServer) -> None:
    """A run that is stopped is no failure."""

    async def silent(asked: Any) -> Any:
        await asyncio.sleep(30 if asked.is_open else 0)
        yield {"text": "late", "origin": "plain", "t": 30.0}

    scripted.scripts["slow"] = silent
    await run(page, scripted.url, "slow", until="Running with the draft.")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("status")).to_have_text("Stopped before anything came.")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_unreachable_server_is_told(page: Page, scripted: ScriptedServer) -> None:
    """A server that is gone is an error line, not a page that waits."""
    await open_page(page, scripted.url)
    await page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    await page.get_by_label("Prompt", exact=True).fill("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached. Check that it runs")
    await expect(page.get_by_role("status")).to_have_text("No connection.")


async def test_api_key_is_asked_for_sent_and_kept_nowhere(page: Page, scripted: ScriptedServer) -> None:
    """401 opens the field; the key goes along as a bearer token and is in no storage, cookie, URL or attribute."""
    scripted.api_key = "key-only-in-memory"
    await page.goto(scripted.url)
    await expect(page.get_by_role("alert")).to_have_text(
        "This server needs an API key. Enter it under \u201cAPI key\u201d. Only this page\u2019s memory keeps it."
    )
    await expect(page.get_by_role("status")).to_have_text("An API key is needed.")
    assert await page.get_by_role("group", name="Examples").get_by_role("button").count() == 3
    field = page.get_by_label("Kept in this page only")
    await expect(field).to_be_focused()
    assert await field.get_attribute("type") == "password"
    await page.keyboard.type("another-key")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("The server does not know this API key.")
    await field.fill(scripted.api_key)
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
    await expect(page.get_by_role("status")).to_have_text("Ready.")
    await expect(page.get_by_label("Model").locator("option").first).to_be_attached()
    await expect(page.get_by_role("alert")).to_be_hidden()
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert scripted.asked[0].headers["authorization"] == f"Bearer {scripted.api_key}"
    kept = await page.evaluate(
        "async () => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href,"
        " history.state, await indexedDB.databases(), await caches.keys(), document.documentElement.outerHTML])"
    )
    assert scripted.api_key not in kept
    assert json.loads(kept)[:3] == [{}, {}, ""]
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("needs an API key")


async def test_what_the_keys_budget_has_left_is_shown(page: Page, scripted: ScriptedServer) -> None:
    """As the server tells it, after each answer; nothing where nothing is limited."""
    budget = page.locator("#budget")
    await run(page, scripted.url, "echo")
    await expect(budget).to_be_hidden()
    tokens = {"limit": 1_000_000, "spent": 1234, "reserved": 0, "left": 998_766}
    scripted.budget = {"tokens": tokens, "cost": {"limit": 2.5, "spent": 1.25, "reserved": 0, "left": 1.25}}
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(budget).to_have_text(
        "Left of this key\u2019s budget: 998,766 of 1,000,000 tokens; 1.25 of 2.5 in money."
    )
    scripted.budget = {"tokens": tokens | {"left": 0}}
    await page.get_by_label("Model").select_option("spent")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(budget).to_have_text("Left of this key\u2019s budget: 0 of 1,000,000 tokens.")
    await expect(budget).to_have_class("muted used-up")
