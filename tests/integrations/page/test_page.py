"""The page of `llm-spec serve`, in a real browser: what the user sees, and what the page must never do.

The first part is of the server itself, too; the others need answers that go wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from typing import Any, Final

import pytest

pytest.importorskip("playwright")

from playwright.async_api import Browser, Page, expect

from .browser import Seen
from .scripted_server import HOSTILE_TEXT, PAGE, RACE_STREAMS, TRACE, ScriptedServer

PAINTED_TEXT: Final = """() => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const shown = node.checkVisibility() && !node.closest("script, title");
    if (!walker.currentNode.data.trim() || !shown) continue;
    const inSvg = node.closest("svg");
    const colour = parse(inSvg ? getComputedStyle(node).fill : getComputedStyle(node).color);
    const box = node.classList.contains("lane-label") ? getComputedStyle(node.previousElementSibling).fill : "none";
    const lights = [luminance(colour), luminance(box === "none" ? behind(node) : parse(box))].sort((a, b) => b - a);
    found.push({ text: walker.currentNode.data.slice(0, 40), contrast: (lights[0] + 0.05) / (lights[1] + 0.05) });
  }
  return found;
}"""


async def open_page(page: Page, url: str) -> None:
    await page.goto(url)
    await expect(page.get_by_label("Model").locator("option").first).to_be_attached()


async def run(page: Page, url: str, model: str | None = None, *, until: str | None = "Done:") -> None:
    """Opens the page, asks the model, and waits for the status."""
    await open_page(page, url)
    if model is not None:
        await page.get_by_label("Model").select_option(model)
    await page.get_by_label("Prompt").fill("import heapq\n\ndef push(items, item):\n")
    await page.get_by_role("button", name="Run", exact=True).click()
    if until is not None:
        await expect(page.get_by_role("status")).to_contain_text(until)


async def text_of(page: Page, name: str) -> str:
    return await page.get_by_role("group", name=f"Text of the {name}").evaluate("(group) => group.textContent")


class TestAnyServer:
    """Holds for the recorded answers and for a real server with one pair."""

    async def test_answer_figures_and_rounds_agree(self, page: Page, page_server: str, seen: Seen) -> None:
        """As many bars as rounds, counts that add up to the tokens, no word on the console, no request elsewhere."""
        await run(page, page_server)
        assert await text_of(page, "answer")
        told = await page.locator("#tokens-a-round small").inner_text()
        assert await page.locator("#timeline g.round").count() == int(told.split()[0])
        counts = [int(await slot.inner_text()) for slot in await page.locator("#legend [data-origin]").all()]
        status = await page.get_by_role("status").inner_text()
        assert sum(counts) == int(re.findall(r"Done: (\d+) token", status)[0])
        assert re.fullmatch(r"\d+ %", await first_line(page, "acceptance"))
        assert await first_line(page, "guarantee") == "tokens"
        assert seen.console == []
        assert all(url.startswith((page_server, "data:")) for url in seen.urls), seen.urls

    async def test_each_origin_has_a_colour_and_another_cue(self, page: Page, page_server: str) -> None:
        """The four origins differ in colour and in the line below, in the legend as in the text."""
        await run(page, page_server)
        looks = await page.locator("#legend b").evaluate_all(
            "(all) => all.map((b) => [getComputedStyle(b).color, getComputedStyle(b).textDecoration.split(' ')"
            ".filter((word) => /none|solid|wavy|double/.test(word)).join()])"
        )
        assert len({colour for colour, _ in looks}) == len({line for _, line in looks}) == 4
        in_text = await page.locator("#answer span").evaluate_all(
            "(all) => all.map((s) => [s.className, getComputedStyle(s).color])"
        )
        names = await page.locator("#legend b").all_inner_texts()
        assert {tuple(pair) for pair in in_text} <= set(zip(names, (colour for colour, _ in looks), strict=True))
        assert len({name for name, _ in in_text}) >= 2

    async def test_plain_beside_has_the_same_text_and_a_ratio(self, page: Page, page_server: str) -> None:
        """The target alone, on demand: its text, its time, the ratio, and whether the text is the same."""
        await run(page, page_server)
        await page.get_by_role("button", name="Run plain beside").click()
        await expect(page.get_by_text("The same text.", exact=True)).to_be_visible()
        assert await text_of(page, "plain run") == await text_of(page, "answer")
        assert re.fullmatch(r"[\d.]+x", await page.locator("#ratio").inner_text())
        assert re.fullmatch(r"[\d.]+ m?s", await page.locator("#plain-time").inner_text())
        assert "plain" in await page.locator("#speedup small").inner_text()


async def first_line(page: Page, figure: str) -> str:
    return (await page.locator(f"#{figure}").inner_text()).splitlines()[0]


async def test_the_recorded_answer_is_shown_whole(page: Page, scripted: ScriptedServer) -> None:
    """Every token's text, with its origin; figures as the result tells them."""
    await run(page, scripted.url)
    texts = [part for part in TRACE["tokens"] if "text" in part]
    assert await text_of(page, "answer") == "".join(part["text"] for part in texts)
    for origin in ("accepted", "correction", "bonus"):
        marked = "".join(await page.locator(f"#answer .{origin}").all_inner_texts())
        expected = "".join(part["text"] for part in texts if part["origin"] == origin)
        assert "".join(marked.split()) == "".join(expected.split())
    told = TRACE["tokens"][-1]["result"]
    assert await first_line(page, "acceptance") == f"{told['acceptance_rate']:.0%}".replace("%", " %")
    assert await first_line(page, "tokens-a-round") == f"{told['metrics']['mean_acceptance_length']:.2f}"
    assert await first_line(page, "first-text") == f"{told['timings']['first_text_s'] * 1000:.0f} ms"
    assert await first_line(page, "speedup") == "\u2013"  # too few plain steps: not given


async def test_request_is_what_the_fields_say(page: Page, scripted: ScriptedServer) -> None:
    """The body and headers of the wire; an empty seed is left to the server, and the plain run takes the one used."""
    await open_page(page, scripted.url)
    await page.get_by_label("Prompt").fill("def push(self):")
    await page.get_by_label("Max tokens").fill("77")
    await page.get_by_label("Temperature").fill("0.7")
    await page.get_by_label("Strategy").select_option("tokens")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await page.get_by_label("Prompt").fill("changed since")
    await page.get_by_role("button", name="Run plain beside").click()
    await expect(page.locator("#ratio")).to_be_visible()
    first, second = scripted.asked
    body: dict[str, Any] = {"model": "builtin", "stream": True, "stream_options": {"include_usage": True}}
    body |= {"max_tokens": 77, "temperature": 0.7, "messages": [{"role": "user", "content": "def push(self):"}]}
    assert first.body == body
    assert second.body == body | {"seed": TRACE["settings"]["seed"]}
    assert (first.headers["x-llm-spec-trace"], first.headers["x-llm-spec-strategy"]) == ("1", "tokens")
    assert second.strategy == "plain"
    assert "authorization" not in first.headers
    await page.get_by_label("Strategy").select_option("auto")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert "x-llm-spec-strategy" not in scripted.asked[-1].headers


async def test_race_shows_concurrent_streams_and_what_went_wrong(page: Page, scripted: ScriptedServer) -> None:
    """Streams that overlap lie in different lanes, cancelled ones look otherwise; fallbacks and retries are told."""
    await run(page, scripted.url, "race")
    assert await page.locator("#timeline .upstream").count() == len(RACE_STREAMS)
    assert await page.locator("#timeline .cancelled").count() == 2
    boxes = await page.locator("#timeline .upstream rect").evaluate_all(
        "(all) => all.map((r) => ['x', 'y', 'width'].map((name) => Number(r.getAttribute(name))))"
    )
    lanes: dict[float, list[tuple[float, float]]] = {}
    for x, y, width in boxes:
        lanes.setdefault(y, []).append((x, x + width))
    assert len(lanes) == 4
    for lane in lanes.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(lane)))
    notices = await page.locator("#notices li").all_inner_texts()
    assert len(notices) == 2
    assert "<b>busy</b>" in notices[0]
    assert await first_line(page, "speedup") == "2.10x"
    assert "the plain answers of this server" in await page.locator("#speedup").inner_text()
    assert await first_line(page, "cost") == "0.00127"
    await page.get_by_role("button", name="Run plain beside").click()
    verdict = page.locator("#verdict")
    await expect(verdict).to_contain_text("Another text from character 14; race does not promise the same text")
    await expect(verdict).to_contain_text("2.00x")


async def test_text_arrives_while_it_is_made_and_stop_ends_it(page: Page, scripted: ScriptedServer) -> None:
    """Stop closes the connection, keeps what came, and the page can run again."""
    await run(page, scripted.url, "slow", until="Running.")
    await expect(page.locator("#answer")).to_contain_text("word3")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("status")).to_contain_text("Stopped")
    for _ in range(100):
        if not scripted.asked[0].is_open:
            break
        await asyncio.sleep(0.02)
    assert not scripted.asked[0].is_open
    assert "word3" in await text_of(page, "answer")
    await expect(page.get_by_role("alert")).to_be_hidden()
    await page.get_by_label("Model").select_option("builtin")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    assert "word3" not in await text_of(page, "answer")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("refused", "Too many requests: <b>try again</b> in 3 s (HTTP 429)"),
        ("no-json", "Bad Gateway (HTTP 502)"),
        ("broken", "target scripted:target: out of <memory>"),
        ("cut", "The connection closed before the answer was done."),
        ("torn", "The answer broke off: network error"),
    ],
)
async def test_error_is_one_clear_line(page: Page, scripted: ScriptedServer, model: str, message: str) -> None:
    """Before the stream and within it: the message, what came before it, and a page that works on."""
    await run(page, scripted.url, model, until="Failed.")
    await expect(page.get_by_role("alert")).to_have_text(message)
    assert await text_of(page, "answer") == ("Half an " if model in {"broken", "cut", "torn"} else "")
    await page.get_by_label("Model").select_option("builtin")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_unreachable_server_is_told(page: Page, scripted: ScriptedServer) -> None:
    """A server that is gone is an error line, not a page that waits."""
    await open_page(page, scripted.url)
    await page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    await page.get_by_label("Prompt").fill("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")


async def test_keyboard_is_enough(page: Page, scripted: ScriptedServer) -> None:
    """Every control is reached by Tab with a visible focus; Ctrl+Enter runs, Esc stops."""
    await open_page(page, scripted.url)
    order = ["prompt", "model", "strategy", "max-tokens", "temperature", "seed", "run", "stop"]
    order += ["SUMMARY", "plain", "answer"]
    reached = []
    for _ in order:
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        style = "getComputedStyle(document.activeElement)"
        assert await page.evaluate(f"{style}.outlineStyle !== 'none' && parseFloat({style}.outlineWidth) >= 2")
    assert reached == order
    await page.get_by_label("Model").focus()
    await page.keyboard.type("slow")
    await page.get_by_label("Prompt").focus()
    await page.keyboard.type("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator("#answer")).to_contain_text("word1")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("status")).to_contain_text("Stopped")
    await page.get_by_label("Model").focus()
    await page.keyboard.type("builtin")
    await page.keyboard.press("Meta+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    await page.get_by_role("button", name="Run plain beside").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("The same text.", exact=True)).to_be_visible()


async def test_every_field_has_a_name_and_what_is_missing_is_said(page: Page, scripted: ScriptedServer) -> None:
    """No control without an accessible name; an empty prompt or a wrong number sends nothing."""
    await open_page(page, scripted.url)
    for field in await page.locator("input, select, textarea").all():
        assert await field.evaluate("(field) => field.labels.length") == 1
    await page.get_by_label("Prompt").fill("")
    await page.keyboard.press("Control+Enter")
    assert await page.evaluate("document.activeElement.id") == "prompt"
    await page.get_by_label("Prompt").fill("hello")
    await page.get_by_label("Max tokens").fill("0")
    await page.keyboard.press("Control+Enter")
    assert await page.evaluate("document.activeElement.id") == "max-tokens"
    assert scripted.asked == []


async def test_status_is_not_read_out_with_every_token(page: Page, scripted: ScriptedServer) -> None:
    """A screen reader hears that it runs and that it is done; the answer itself is no live region."""
    await open_page(page, scripted.url)
    await page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.getElementById('status').textContent))"
        ".observe(document.getElementById('status'), { childList: true, characterData: true, subtree: true })"
    )
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done:")
    said = await page.evaluate("said")
    assert said[0] == "Running."
    assert len(said) == 2
    live = await page.locator("[aria-live], [role=status], [role=alert], [role=log]").evaluate_all(
        "(all) => all.map((node) => node.id)"
    )
    assert sorted(live) == ["alert", "status"]


@pytest.mark.parametrize("model", ["builtin", "race"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_contrast_in_both_themes(
    browser: Browser, scripted: ScriptedServer, scheme: Any, model: str
) -> None:
    """Every text that is shown stands out by at least 4.5 : 1, errors and disabled buttons too."""
    page = await browser.new_page(color_scheme=scheme)
    await run(page, scripted.url, model)
    await page.get_by_role("button", name="Run plain beside").click()
    await expect(page.locator("#ratio")).to_be_visible()
    await page.evaluate("document.getElementById('key-box').open = true")
    painted = await page.evaluate(PAINTED_TEXT)
    await run(page, scripted.url, "broken", until="Failed.")
    painted += await page.evaluate(PAINTED_TEXT)
    assert len(painted) > 60
    assert [text for text in painted if text["contrast"] < 4.5] == []
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    await page.close()


async def test_what_a_model_writes_stays_text(page: Page, scripted: ScriptedServer, seen: Seen) -> None:
    """Markup in the text, the reasoning, names and reasons is shown and never parsed."""
    await run(page, scripted.url, "hostile")
    assert await text_of(page, "answer") == HOSTILE_TEXT * 2
    assert await page.locator("#reasoning pre").text_content() == HOSTILE_TEXT
    assert HOSTILE_TEXT in await page.locator("#notices").inner_text()
    assert await page.locator("#results img, #results script, #answer b").count() == 0
    assert await page.title() == "llm_spec"
    assert await page.locator("#answer span").evaluate_all("(all) => all.map((s) => s.className)") == [
        "correction",
        "plain",
    ]
    assert seen.console == []


@pytest.mark.parametrize("model", ["builtin", "race", "hostile", "long"])
async def test_a_narrow_screen_does_not_scroll_sideways(browser: Browser, scripted: ScriptedServer, model: str) -> None:
    """360 pixels are enough, with the plain run beside too."""
    page = await browser.new_page(viewport={"width": 360, "height": 740})
    await run(page, scripted.url, model)
    await page.get_by_role("button", name="Run plain beside").click()
    await expect(page.locator("#ratio")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360
    drawn = await page.locator("#timeline").evaluate("(node) => [node.clientWidth, node.parentElement.clientWidth]")
    assert drawn[0] <= drawn[1]
    await page.close()


async def test_a_long_answer_stays_responsive(page: Page, scripted: ScriptedServer) -> None:
    """5,000 tokens in 1,000 rounds: drawn at most once a frame, no long pause, and the page answers meanwhile."""
    await open_page(page, scripted.url)
    await page.evaluate(
        """() => {
          window.longest_ms = 0; window.numFrames = 0; window.numDrawn = 0;
          let last = performance.now();
          const frame = (now) => {
            longest_ms = Math.max(longest_ms, now - last);
            last = now;
            numFrames++;
            requestAnimationFrame(frame);
          };
          requestAnimationFrame(frame);
          new MutationObserver(() => numDrawn++).observe(document.getElementById('answer'), { childList: true });
        }"""
    )
    await page.get_by_label("Model").select_option("long")
    await page.get_by_label("Prompt").fill("hello")
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Done: 5000 tokens", timeout=30_000)
    assert len((await text_of(page, "answer")).split()) == 5000
    assert await page.locator("#timeline g.round").count() == 1000
    longest_ms, num_frames, num_drawn = await page.evaluate("[longest_ms, numFrames, numDrawn]")
    assert num_drawn <= num_frames + 2
    assert longest_ms < 500
    at_end = await page.locator("#answer").evaluate("(node) => node.scrollHeight - node.scrollTop - node.clientHeight")
    assert at_end < 40


async def test_api_key_is_asked_for_sent_and_kept_nowhere(page: Page, scripted: ScriptedServer) -> None:
    """401 opens the field; the key goes along as a bearer token and is in no storage, cookie, URL or attribute."""
    scripted.api_key = "key-only-in-memory"
    await page.goto(scripted.url)
    await expect(page.get_by_role("alert")).to_contain_text("This server wants an API key (HTTP 401)")
    field = page.get_by_label("Kept in this page only")
    await expect(field).to_be_focused()
    assert await field.get_attribute("type") == "password"
    await page.keyboard.type(scripted.api_key)
    await page.keyboard.press("Tab")
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
    await expect(page.get_by_role("alert")).to_contain_text("HTTP 401")


async def test_odd_but_legal_events_are_read(page: Page, scripted: ScriptedServer) -> None:
    """Comments, ids, carriage returns, a character and a line end cut in two."""
    await run(page, scripted.url, "lines")
    assert await text_of(page, "answer") == "caf\u00e9 \u2192 \U0001f40d"


async def test_models_bring_their_strategies(page: Page, scripted: ScriptedServer) -> None:
    """The strategies offered, and the pair shown, are those of the chosen model."""
    await open_page(page, scripted.url)
    await page.get_by_label("Model").select_option("race")
    assert await page.get_by_label("Strategy").locator("option").all_inner_texts() == ["auto", "plain", "race"]
    await expect(page.locator("#pair")).to_have_text("scripted:draft → scripted:target")


async def test_motion_is_left_out_where_it_is_not_wanted(browser: Browser, scripted: ScriptedServer) -> None:
    """With prefers-reduced-motion nothing has a transition or an animation."""
    page = await browser.new_page(reduced_motion="reduce")
    await open_page(page, scripted.url)
    moving = await page.evaluate(
        "[...document.querySelectorAll('*')].filter((node) => { const style = getComputedStyle(node);"
        " return style.transitionDuration !== '0s' || style.animationName !== 'none'; }).length"
    )
    assert moving == 0
    await page.close()


def test_the_page_is_one_file_without_foreign_parts() -> None:
    """No address of another origin, no markup made of strings, no storage."""
    source = PAGE.read_text()
    addresses = set(re.findall(r"https?://[^\s\"'`]+", source))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|sessionStorage|eval\(|new Function"
    )
    assert re.findall(forbidden, source) == []
